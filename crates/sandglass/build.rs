//! Tells the compiler where the guest binary is that this program carries.
//!
//! The guest is built apart, because it is linked statically and for size: `make guest` does it and sets
//! `SANDGLASS_GUEST`. Without it the program builds all the same, and needs `--guest` to serve.

use std::path::Path;
use std::{env, process};

fn main() {
    println!("cargo::rustc-check-cfg=cfg(embedded_guest)");
    println!("cargo::rerun-if-env-changed=SANDGLASS_GUEST");
    let Ok(guest) = env::var("SANDGLASS_GUEST") else { return };
    if !Path::new(&guest).is_absolute() || !Path::new(&guest).is_file() {
        println!("cargo::error=SANDGLASS_GUEST={guest} is not the absolute path of a file; run `make guest`");
        process::abort();
    }
    println!("cargo::rerun-if-changed={guest}");
    println!("cargo::rustc-env=SANDGLASS_GUEST={guest}");
    println!("cargo::rustc-cfg=embedded_guest");
}
