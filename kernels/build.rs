//! Compiles `cuda/*.cu` for Hopper when the feature `cuda` is on, and writes the table of the results.

use std::env;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};

/// Compilations at once: a kernel file takes up to a gigabyte and a minute.
const JOBS: usize = 2;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    if env::var_os("CARGO_FEATURE_CUDA").is_none() {
        return;
    }
    for name in ["NVCC", "CUDA_HOME", "PATH"] {
        println!("cargo::rerun-if-env-changed={name}");
    }
    println!("cargo::rerun-if-changed=cuda");
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let nvcc = nvcc();
    let mut sources: Vec<PathBuf> = std::fs::read_dir("cuda")
        .expect("kernels/cuda is readable")
        .map(|entry| entry.expect("kernels/cuda is readable").path())
        .filter(|path| path.extension().is_some_and(|e| e == "cu"))
        .collect();
    sources.sort();
    let mut table = String::from("[\n");
    for batch in sources.chunks(JOBS) {
        let running: Vec<_> = batch
            .iter()
            .map(|source| {
                let stem = source.file_stem().expect("a file name").to_string_lossy();
                let cubin = out.join(format!("{stem}.cubin"));
                let _ = writeln!(table, "    ({stem:?}, include_bytes!({cubin:?})),");
                (source, start(&nvcc, source, &cubin))
            })
            .collect();
        for (source, mut child) in running {
            let status = child.wait().expect("nvcc can be waited for");
            assert!(status.success(), "nvcc failed on {}", source.display());
        }
    }
    table.push(']');
    std::fs::write(out.join("cubins.rs"), table).expect("OUT_DIR is writable");
}

/// `NVCC`, else `$CUDA_HOME/bin/nvcc`, else whatever the path has.
fn nvcc() -> PathBuf {
    if let Some(nvcc) = env::var_os("NVCC") {
        return nvcc.into();
    }
    let home = env::var_os("CUDA_HOME").map(|home| Path::new(&home).join("bin/nvcc"));
    home.filter(|path| path.exists())
        .unwrap_or_else(|| "nvcc".into())
}

fn start(nvcc: &Path, source: &Path, cubin: &Path) -> Child {
    Command::new(nvcc)
        .args([
            "-std=c++17",
            "-O3",
            "--expt-relaxed-constexpr",
            "-DNDEBUG",
            "-cubin",
        ])
        // wgmma and setmaxnreg exist for this target only.
        .arg("-gencode=arch=compute_90a,code=sm_90a")
        .arg("-o")
        .arg(cubin)
        .arg(source)
        .spawn()
        .unwrap_or_else(|e| {
            panic!(
                "the feature `cuda` needs nvcc 13 (set NVCC or CUDA_HOME): {}: {e}",
                nvcc.display()
            )
        })
}
