//! Compiles `omni/v1/*.proto` with protox (no protoc needed) into tonic code and a descriptor set.
use std::{env, error::Error, path::PathBuf};

use prost::Message as _;

const FILES: [&str; 6] = [
    "omni/v1/common.proto",
    "omni/v1/image.proto",
    "omni/v1/stage.proto",
    "omni/v1/kv_transfer.proto",
    "omni/v1/registry.proto",
    "omni/v1/admin.proto",
];

fn main() -> Result<(), Box<dyn Error>> {
    for file in FILES {
        println!("cargo:rerun-if-changed={file}");
    }
    let descriptors = protox::compile(FILES, ["."])?;
    let out = PathBuf::from(env::var("OUT_DIR")?);
    std::fs::write(out.join("omni_descriptor.bin"), descriptors.encode_to_vec())?;
    tonic_prost_build::configure().compile_fds(descriptors)?;
    Ok(())
}
