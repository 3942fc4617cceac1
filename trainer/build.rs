//! Sets the rpath of the binary and the tests to libtorch, so that they run with no variable set.

fn main() -> Result<(), std::env::VarError> {
    let folder = std::env::var("DEP_FEEDLINE_BRIDGE_LIBTORCH_LIB")?;
    println!("cargo:rustc-link-arg=-Wl,-rpath,{folder}");
    println!("cargo:rerun-if-changed=build.rs");
    Ok(())
}
