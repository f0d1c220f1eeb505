//! Compiles `cuda/*.cu` for Hopper when the feature `cuda` is on, and writes the table of the results.
//!
//! `OMNI_CUDA_STUBS=1` leaves the kernels out, for checking the Rust side where there is no nvcc: such a build
//! answers every launch with an error.

use std::env;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::SystemTime;

/// Compilations at once: a kernel file takes up to a gigabyte and a minute.
const JOBS: usize = 2;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    if env::var_os("CARGO_FEATURE_CUDA").is_none() {
        return;
    }
    for name in ["NVCC", "CUDA_HOME", "OMNI_CUDA_STUBS"] {
        println!("cargo::rerun-if-env-changed={name}");
    }
    println!("cargo::rerun-if-changed=cuda");
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let mut table = String::from("[\n");
    if env::var_os("OMNI_CUDA_STUBS").is_none() {
        let files = listed("cuda");
        let headers = files.iter().filter(|path| has_extension(path, "cuh"));
        let newest = headers.map(|path| modified(path)).max();
        let sources: Vec<_> = files
            .iter()
            .filter(|path| has_extension(path, "cu"))
            .collect();
        compile(&sources, newest, &out, &mut table);
    }
    table.push(']');
    std::fs::write(out.join("cubins.rs"), table).expect("OUT_DIR is writable");
}

/// Compiles what is older than its source or than the newest header, a few at a time.
fn compile(sources: &[&PathBuf], newest: Option<SystemTime>, out: &Path, table: &mut String) {
    let nvcc = nvcc();
    for batch in sources.chunks(JOBS) {
        let mut running = Vec::new();
        for source in batch {
            let stem = source.file_stem().expect("a file name").to_string_lossy();
            let cubin = out.join(format!("{stem}.cubin"));
            let _ = writeln!(table, "    ({stem:?}, include_bytes!({cubin:?})),");
            let needed = newest.max(Some(modified(source)));
            if !cubin.exists() || Some(modified(&cubin)) < needed {
                running.push((source, start(&nvcc, source, &cubin)));
            }
        }
        for (source, mut child) in running {
            let status = child.wait().expect("nvcc can be waited for");
            assert!(status.success(), "nvcc failed on {}", source.display());
        }
    }
}

fn listed(folder: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).expect("kernels/cuda is readable");
    let mut files: Vec<_> = entries
        .map(|entry| entry.expect("kernels/cuda is readable").path())
        .collect();
    files.sort();
    files
}

fn has_extension(path: &Path, wanted: &str) -> bool {
    path.extension().is_some_and(|e| e == wanted)
}

fn modified(path: &Path) -> SystemTime {
    let metadata = std::fs::metadata(path).and_then(|m| m.modified());
    metadata.expect("files have times")
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
