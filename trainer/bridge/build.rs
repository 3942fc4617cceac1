//! Compiles the shim against the libtorch that `torch-sys` links, and passes its folder to
//! dependents.

use std::env;
use std::error::Error;
use std::fs;
use std::path::PathBuf;

/// One subject each.
const SOURCES: [&str; 7] = [
    "shim/shim.cpp",
    "shim/autograd.cpp",
    "shim/optim.cpp",
    "shim/runtime.cpp",
    "shim/store.cpp",
    "shim/dist.cpp",
    "shim/tensor_parallel.cpp",
];

fn main() -> Result<(), Box<dyn Error>> {
    // Printed by torch-sys, which has `links = "tch"`; seen only by its direct dependents.
    let lib = PathBuf::from(env::var("DEP_TCH_LIBTORCH_LIB")?);
    let include = lib
        .parent()
        .ok_or("cannot find the headers of libtorch: its folder has no parent")?
        .join("include");
    println!("cargo:rerun-if-changed=shim");
    let mut build = cc::Build::new();
    // The same in all profiles, so that ccache reuses the objects of one profile for another.
    build.opt_level(2).debug(false);
    build.cpp(true).std("c++17").define("_GLIBCXX_USE_CXX11_ABI", "1");
    // libtorch was built with Gloo, whose headers it does not include.
    build.define("USE_C10D_GLOO", None).include("shim/gloo_decl");
    let mut system = vec![include.clone(), include.join("torch/csrc/api/include")];
    let cuda = env::var_os("CARGO_FEATURE_CUDA").is_some();
    if cuda {
        let nvidia = lib.join("../../nvidia");
        if !nvidia.join("nccl/include/nccl.h").exists() {
            return Err("cannot build the feature cuda: expected libtorch for CUDA (hint: run \
                        `scripts/setup.sh --cuda` and set LIBTORCH to .libtorch-cuda/torch)"
                .into());
        }
        build.define("USE_C10D_NCCL", None).include("shim/cuda_decl");
        system.extend(["cu13/include", "nccl/include"].map(|folder| nvidia.join(folder)));
    }
    // Warnings in the headers of libtorch and CUDA are ignored.
    for folder in system {
        build.flag("-isystem").flag(folder);
    }
    build.flag("-fvisibility=hidden").warnings(true).extra_warnings(true);
    if env::var_os("CARGO_FEATURE_FAKE_GPU").is_some() {
        println!("cargo:rerun-if-changed=tests/fake_gpu.cpp");
        build.file("tests/fake_gpu.cpp");
    }
    build.files(SOURCES);
    // Clippy links nothing, and cargo keeps its build outputs separate.
    let wrapper = env::var("RUSTC_WORKSPACE_WRAPPER").unwrap_or_default();
    if !wrapper.ends_with("clippy-driver") {
        build.compile("feedline_bridge");
    }
    println!("cargo:rustc-link-lib=dylib=torch_cpu");
    println!("cargo:rustc-link-lib=dylib=c10");
    if cuda {
        println!("cargo:rustc-link-lib=dylib=torch_cuda");
        println!("cargo:rustc-link-lib=dylib=c10_cuda");
    }

    // A link argument does not reach other packages: each that makes binaries or tests prints its
    // own, from this. Resolved, because a library finds its neighbours from its real path.
    let real = fs::canonicalize(lib.join("libtorch_cpu.so"))?;
    let folder = real.parent().ok_or("cannot find the folder of libtorch_cpu.so")?.display();
    println!("cargo:libtorch_lib={folder}");
    println!("cargo:rustc-link-arg=-Wl,-rpath,{folder}");
    Ok(())
}
