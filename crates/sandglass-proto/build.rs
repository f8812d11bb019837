//! Generates messages and services from `proto/` without `protoc`.

use std::error::Error;
use std::path::PathBuf;

use prost::Message as _;

const FILES: [&str; 2] = ["process/process.proto", "filesystem/filesystem.proto"];

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo:rerun-if-changed=proto");
    let out = PathBuf::from(std::env::var_os("OUT_DIR").ok_or("OUT_DIR is not set")?);

    let mut compiler = protox::Compiler::new(["proto"])?;
    compiler.include_imports(true).include_source_info(true).open_files(FILES)?;
    let set = out.join("descriptors.bin");
    std::fs::write(&set, compiler.file_descriptor_set().encode_to_vec())?;

    connectrpc_build::Config::new()
        .descriptor_set(&set)
        .files(&FILES)
        .gate_client_feature(true)
        .emit_register_fn(false)
        .emit_rerun_directives(false)
        .include_file("services.rs")
        .compile()?;
    Ok(())
}
