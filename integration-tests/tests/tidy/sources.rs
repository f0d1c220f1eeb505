//! What source files may and may not hold.
use std::path::{Path, PathBuf};

use crate::{assert_none, files, graph::Graph, read};

/// Longest source file, in lines.
const MAX_LINES: usize = 700;

/// Where `unsafe` may stand: path prefixes.
const UNSAFE_HOMES: [&str; 4] = [
    "kernels/src/cuda",
    "kernels/src/cpu/simd",
    "services/shared/parallel/src/nccl",
    "services/shared/fabric/src",
];

/// This folder spells out what it forbids.
const HERE: &str = "integration-tests/tests/tidy";

fn sources(extensions: &[&str]) -> impl Iterator<Item = (PathBuf, String)> {
    files(extensions)
        .into_iter()
        .filter(|path| !path.starts_with(HERE))
        .map(|path| {
            let text = read(&path);
            (path, text)
        })
}

/// `path:line` of every line that `matches`.
fn lines_where(extensions: &[&str], matches: impl Fn(&Path, &str) -> bool) -> Vec<String> {
    let mut found = Vec::new();
    for (path, text) in sources(extensions) {
        for (number, line) in text.lines().enumerate() {
            if matches(&path, line) {
                found.push(format!(
                    "{}:{}: {}",
                    path.display(),
                    number + 1,
                    line.trim()
                ));
            }
        }
    }
    found
}

#[test]
fn no_source_file_is_too_long() {
    let long = sources(&["rs", "proto", "py", "sh"])
        .map(|(path, text)| (path, text.lines().count()))
        .filter(|(_, lines)| *lines > MAX_LINES)
        .map(|(path, lines)| format!("{}: {lines} lines", path.display()))
        .collect();
    assert_none(long, "split these");
}

#[test]
fn unsafe_code_stays_in_its_modules() {
    let allowed = |path: &Path| {
        let path = path.to_str().unwrap();
        UNSAFE_HOMES.iter().any(|home| path.starts_with(home))
    };
    let is_unsafe = |line: &str| {
        let code = line.split("//").next().unwrap_or("");
        ["unsafe {", "unsafe fn ", "unsafe impl ", "unsafe extern "]
            .iter()
            .any(|w| code.contains(w))
    };
    let found = lines_where(&["rs"], |path, line| !allowed(path) && is_unsafe(line));
    assert_none(found, "unsafe outside its modules");

    // The crates that own such a module deny it workspace-wide instead and allow it by attribute.
    let owns = |folder: &str| {
        UNSAFE_HOMES
            .iter()
            .any(|home| home.starts_with(&format!("{folder}/")))
    };
    let mut open = Vec::new();
    for (name, folder) in Graph::load().members() {
        let roots = ["src/lib.rs", "src/main.rs"].map(|file| Path::new(&folder).join(file));
        for root in roots {
            let exists = integration_tests::workspace_root().join(&root).exists();
            if exists && !owns(&folder) && !read(&root).contains("#![forbid(unsafe_code)]") {
                open.push(format!("{name}: {}", root.display()));
            }
        }
    }
    assert_none(open, "crate roots without #![forbid(unsafe_code)]");
}

#[test]
fn every_crate_says_what_it_is() {
    let is_root = |path: &Path| {
        path.ends_with("src/lib.rs") || path.ends_with("src/main.rs") || path.ends_with("build.rs")
    };
    let silent = sources(&["rs"])
        .filter(|(path, text)| is_root(path) && !text.starts_with("//!"))
        .map(|(path, _)| path.display().to_string())
        .collect();
    assert_none(silent, "crate roots that do not start with //!");
}

#[test]
fn nothing_is_left_to_do_and_no_machine_is_named() {
    const TEXT: [&str; 8] = ["rs", "proto", "py", "sh", "md", "toml", "yaml", "yml"];
    let words = [
        "TODO",
        "FIXME",
        "XXX",
        "/work/",
        "/home/",
        "/root/",
        "../shared/",
    ];
    let hosts = ["crates.io", "pypi.org", "registry.npmjs", "proxy.golang"];
    let bad = |line: &str| words.iter().chain(&hosts).any(|word| line.contains(word));
    assert_none(
        lines_where(&TEXT, |_, line| bad(line)),
        "unfinished, or bound to one machine",
    );
}

#[test]
fn every_proto_file_is_compiled_and_every_service_has_a_name() {
    let (build, library) = (
        read(Path::new("proto/build.rs")),
        read(Path::new("proto/src/lib.rs")),
    );
    let (mut offences, mut services) = (Vec::new(), 0);
    for path in files(&["proto"]) {
        let file = path.strip_prefix("proto").unwrap().display().to_string();
        if !build.contains(&format!("\"{file}\"")) {
            offences.push(format!("{file} is not compiled"));
        }
        for line in read(&path).lines() {
            let Some(rest) = line.strip_prefix("service ") else {
                continue;
            };
            let service = rest.trim_end_matches([' ', '{']);
            services += 1;
            if !service.ends_with("Service") || !library.contains(&format!("omni.v1.{service}\"")) {
                offences.push(format!("{file}: {service} is missing in proto::names"));
            }
        }
    }
    assert!(services >= 6, "only {services} services were found");
    assert_none(offences, "wire contract");
}

#[test]
fn every_enum_of_the_wire_starts_with_unspecified() {
    let mut offences = Vec::new();
    for path in files(&["proto"]) {
        let text = read(&path);
        let mut lines = text
            .lines()
            .map(str::trim)
            .filter(|line| !line.starts_with("//"));
        while let Some(line) = lines.next() {
            let first = if line.starts_with("enum ") {
                lines.next()
            } else {
                continue;
            };
            if !first.is_some_and(|value| value.ends_with("_UNSPECIFIED = 0;")) {
                offences.push(format!("{}: {line}", path.display()));
            }
        }
    }
    assert_none(offences, "zero values");
}

#[test]
fn every_script_stops_at_the_first_error() {
    let careless = sources(&["sh"])
        .filter(|(_, text)| {
            !text.starts_with("#!/usr/bin/env bash\n") || !text.contains("\nset -euo pipefail\n")
        })
        .map(|(path, _)| path.display().to_string())
        .collect();
    assert_none(careless, "scripts without bash and set -euo pipefail");
}
