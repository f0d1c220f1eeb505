//! Compiles `omni/v1/*.proto` with protox (no protoc needed) into tonic code and a descriptor set.
//! `image.proto` stands apart: what clients send is decoded strictly.
use std::{env, error::Error, fs, path::PathBuf};

use prost::Message as _;

const FILES: [&str; 6] = [
    "omni/v1/common.proto",
    "omni/v1/image.proto",
    "omni/v1/stage.proto",
    "omni/v1/kv_transfer.proto",
    "omni/v1/registry.proto",
    "omni/v1/admin.proto",
];

/// Decoded by `strict::StrictCodec`. It imports nothing, so it can be generated on its own.
const STRICT: &str = "omni/v1/image.proto";

fn main() -> Result<(), Box<dyn Error>> {
    for file in FILES {
        println!("cargo:rerun-if-changed={file}");
    }
    let descriptors = protox::compile(FILES, ["."])?;
    let out = PathBuf::from(env::var("OUT_DIR")?);
    fs::write(out.join("omni_descriptor.bin"), descriptors.encode_to_vec())?;

    let (mut strict, mut lenient) = (descriptors.clone(), descriptors);
    strict.file.retain(|file| file.name() == STRICT);
    lenient.file.retain(|file| file.name() != STRICT);
    for (set, folder, codec) in [
        (lenient, "lenient", "tonic_prost::ProstCodec"),
        (strict, "strict", "crate::strict::StrictCodec"),
    ] {
        let mut config = tonic_prost_build::Config::new();
        config.enable_type_names();
        let folder = out.join(folder);
        fs::create_dir_all(&folder)?;
        tonic_prost_build::configure()
            .codec_path(codec)
            .out_dir(folder)
            .compile_fds_with_config(set, config)?;
    }
    Ok(())
}
