//! What `omni` says before it serves: settings, checkpoints, measurements.
use std::{fs, path::Path};

use serde_json::Value;

use crate::harness::{model_dir, output};

fn stderr(output: &std::process::Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// A copy of the fixture checkpoint that a test may damage.
fn copy_of_the_model() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(model_dir()).unwrap() {
        let path = entry.unwrap().path();
        fs::copy(&path, dir.path().join(path.file_name().unwrap())).unwrap();
    }
    dir
}

fn up_on(dir: &Path) -> std::process::Output {
    let dir = dir.to_str().unwrap();
    output(&[
        "up",
        "--listen",
        "127.0.0.1:0",
        "--model",
        dir,
        "--log-format",
        "text",
    ])
}

/// Path, bytes and header length of the first shard.
fn first_shard(dir: &Path) -> (std::path::PathBuf, Vec<u8>, usize) {
    let shard = dir.join("model-0001-of-0002.safetensors");
    let bytes = fs::read(&shard).unwrap();
    let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    (shard, bytes, header)
}

#[test]
fn a_truncated_checkpoint_ends_up_with_exit_code_64_and_the_file_named() {
    let dir = copy_of_the_model();
    let (shard, bytes, _) = first_shard(dir.path());
    fs::write(&shard, &bytes[..bytes.len() - 1000]).unwrap();
    let output = up_on(dir.path());
    assert_eq!(output.status.code(), Some(64), "{}", stderr(&output));
    let last = stderr(&output).lines().last().unwrap().to_owned();
    assert!(last.contains("model-0001-of-0002.safetensors"), "{last}");
}

#[test]
fn a_wrongly_shaped_tensor_ends_up_with_exit_code_64_and_the_tensor_named() {
    let dir = copy_of_the_model();
    let (shard, bytes, header) = first_shard(dir.path());
    let mut json: Value = serde_json::from_slice(&bytes[8..8 + header]).unwrap();
    let tensors = json.as_object_mut().unwrap();
    let (name, entry) = tensors
        .iter_mut()
        .find(|(name, _)| *name != "__metadata__")
        .unwrap();
    // The same bytes under a shape of one dimension more.
    entry["shape"].as_array_mut().unwrap().insert(0, 1.into());
    let name = name.clone();
    let text = serde_json::to_vec(&json).unwrap();
    let mut damaged = (text.len() as u64).to_le_bytes().to_vec();
    damaged.extend(text);
    damaged.extend(&bytes[8 + header..]);
    fs::write(&shard, damaged).unwrap();
    let output = up_on(dir.path());
    assert_eq!(output.status.code(), Some(64), "{}", stderr(&output));
    let last = stderr(&output).lines().last().unwrap().to_owned();
    assert!(last.contains(&name), "{name} is not in: {last}");
}

#[test]
fn bad_settings_exit_64_with_one_sentence_before_a_port_opens() {
    let model = model_dir();
    let model = model.to_str().unwrap();
    for (arguments, culprit) in [
        (&["router", "--listen", "nowhere"][..], "listen"),
        (&["up", "--model", "/nonexistent"], "model"),
        (&["up"], "model"),
        (
            &["ar-stage", "--model", model, "--registry", "nowhere"],
            "registry",
        ),
        (
            &["dit-worker", "--model", model, "--max-rows", "0"],
            "max_rows",
        ),
        (
            &["dit-worker", "--model", model, "--plan", "tp=two"],
            "plan",
        ),
        (&["ar-stage", "--model", model, "--plan", "cfg=2"], "plan"),
        (&["up", "--model", model, "--ar-plan", "cfg=2"], "ar_plan"),
        (&["up", "--model", model, "--dit-plan", "tp=0"], "dit_plan"),
        (&["kv-transfer", "--transport", "pigeon"], "transport"),
        (&["kv-transfer", "--pool-bytes", "lots"], "pool_bytes"),
        (
            &["router", "--config", "/nonexistent.toml"],
            "/nonexistent.toml",
        ),
        (
            &["bench", "denoise", "--model", model, "--size", "7x"],
            "size",
        ),
        (
            &["bench", "denoise", "--model", model, "--rows", "0"],
            "rows",
        ),
        (&["bench", "attention", "--tokens", "0"], "tokens"),
    ] {
        let output = output(arguments);
        let said = stderr(&output);
        assert_eq!(output.status.code(), Some(64), "{arguments:?}: {said}");
        assert!(said.contains(culprit), "{arguments:?}: {said}");
        assert_eq!(said.trim_end().lines().count(), 1, "{arguments:?}: {said}");
        assert!(output.stdout.is_empty(), "{arguments:?}");
    }
}

#[test]
fn a_file_setting_shows_with_its_source_and_an_unknown_key_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("omni.toml");
    let path = path.to_str().unwrap();
    fs::write(path, "[router]\nmax_queued = 7\n").unwrap();
    let shown = output(&["config", "show", "router", "--config", path]);
    let text = String::from_utf8(shown.stdout).unwrap();
    assert!(text.contains("max_queued = \"7\" # file"), "{text}");
    fs::write(path, "[router]\nmax_queue = 7\n").unwrap();
    let refused = output(&["config", "show", "router", "--config", path]);
    assert_eq!(refused.status.code(), Some(64));
    assert!(
        stderr(&refused).contains("max_queue"),
        "{}",
        stderr(&refused)
    );
}

#[test]
fn version_names_version_commit_and_profile() {
    let text = String::from_utf8(output(&["--version"]).stdout).unwrap();
    assert!(
        text.starts_with(concat!("omni ", env!("CARGO_PKG_VERSION"), " (")),
        "{text}"
    );
}

#[test]
fn the_memory_of_attention_grows_linearly_with_the_tokens() {
    let lengths = "1024,4096,16384";
    let small = ["--heads", "2", "--kv-heads", "1", "--head-dim", "32"];
    let arguments = [&["bench", "attention", "--tokens", lengths][..], &small].concat();
    let output = output(&arguments);
    assert!(output.status.success(), "{}", stderr(&output));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let sizes = report["sizes"].as_array().unwrap();
    assert_eq!(sizes.len(), 3);
    let number = |size: &Value, key: &str| size[key].as_f64().unwrap();
    let (first, last) = (&sizes[0], &sizes[2]);
    for size in sizes {
        let (peak, mask) = (
            number(size, "peak_scratch_bytes"),
            number(size, "square_mask_bytes"),
        );
        assert!(peak > 0.0, "{size}");
        let per_token = number(size, "peak_bytes_per_token");
        assert!(
            per_token <= 1.05 * number(first, "peak_bytes_per_token"),
            "{report:#}"
        );
        // Even a mask of single bytes would be seen at the largest length.
        if size == last {
            assert!(peak < mask / 4.0, "{size}");
            assert!(number(size, "resident_growth_bytes") < mask / 4.0, "{size}");
        }
    }
}

#[test]
fn a_denoise_benchmark_reports_what_it_measured() {
    let model = model_dir();
    let config = model.join("config.json");
    let config = config.to_str().unwrap();
    let arguments = [
        "bench", "denoise", "--config", config, "--layers", "1", "--steps", "2",
    ];
    let output = output(&arguments);
    assert!(output.status.success(), "{}", stderr(&output));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["layers"], 1);
    assert_eq!(report["rows"], 2);
    assert_eq!(report["weights"], "random");
    // Two rows of 16 x 16 image tokens and one timestep token.
    assert_eq!(report["tokens_per_step"], 2 * (16 * 16 + 1));
    for key in [
        "ms_per_step",
        "ms_per_layer",
        "tflops",
        "tokens_per_second",
        "gflop_per_step",
    ] {
        assert!(
            report[key].as_f64().is_some_and(|value| value > 0.0),
            "{key}: {report:#}"
        );
    }
}

#[test]
fn measured_costs_are_a_part_of_a_cluster_file_as_they_are_printed() {
    let config = model_dir().join("config.json");
    let config = config.to_str().unwrap();
    let arguments = [
        "bench", "costs", "--config", config, "--layers", "1", "--steps", "3", "--small", "64x64",
        "--large", "256x256",
    ];
    let output = output(&arguments);
    assert!(output.status.success(), "{}", stderr(&output));
    let printed = String::from_utf8(output.stdout).unwrap();
    let traces = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/traces");
    let cluster = fs::read_to_string(traces.join("cluster-8-fp8.toml")).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let with_costs = dir.path().join("cluster.toml");
    fs::write(&with_costs, format!("{cluster}\n{printed}")).unwrap();
    let trace = traces.join("uniform.jsonl");
    let simulated = crate::harness::output(&[
        "simulate",
        "--trace",
        trace.to_str().unwrap(),
        "--cluster",
        with_costs.to_str().unwrap(),
        "--load",
        "0.5",
        "-o",
        "json",
    ]);
    assert!(simulated.status.success(), "{}", stderr(&simulated));
    let report: Value = serde_json::from_slice(&simulated.stdout).unwrap();
    assert!(report["images_done"].as_u64().unwrap() > 0, "{report}");
}
