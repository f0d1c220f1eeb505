//! Compiles `omni/v1/*.proto` with protox (no protoc needed) into tonic code and a descriptor set.
//! The service of `image.proto` stands apart: what clients send is decoded strictly.
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

/// Its service decodes by `strict::StrictCodec`.
const STRICT: &str = "omni/v1/image.proto";

/// Messages that hold keys, addresses or tokens; `src/secret.rs` writes their Debug form.
const SECRETIVE: [&str; 3] = [
    ".omni.v1.PrefixHandle",
    ".omni.v1.RemoteRegion",
    ".omni.v1.GrantResponse",
];

fn main() -> Result<(), Box<dyn Error>> {
    for file in FILES {
        println!("cargo:rerun-if-changed={file}");
    }
    let descriptors = protox::compile(FILES, ["."])?;
    let out = PathBuf::from(env::var("OUT_DIR")?);
    fs::write(out.join("omni_descriptor.bin"), descriptors.encode_to_vec())?;

    let (mut strict, mut lenient) = (descriptors.clone(), descriptors);
    for file in &mut strict.file {
        if file.name() != STRICT {
            file.service.clear();
        }
    }
    for file in &mut lenient.file {
        if file.name() == STRICT {
            file.service.clear();
        }
    }
    // Every message is generated once, beside the lenient services.
    let mut all = tonic_prost_build::Config::new();
    all.enable_type_names();
    // What lets its bearer read memory is never logged, by accident either.
    all.skip_debug(SECRETIVE);
    let mut none = tonic_prost_build::Config::new();
    none.extern_path(".omni.v1", "crate::v1");
    for (set, folder, codec, config) in [
        (lenient, "lenient", "tonic_prost::ProstCodec", all),
        (strict, "strict", "crate::strict::StrictCodec", none),
    ] {
        let folder = out.join(folder);
        fs::create_dir_all(&folder)?;
        tonic_prost_build::configure()
            .codec_path(codec)
            .out_dir(folder)
            .compile_fds_with_config(set, config)?;
    }
    Ok(())
}
