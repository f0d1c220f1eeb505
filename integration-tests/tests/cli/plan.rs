//! `omnictl plan`, which needs neither server nor weights.
use std::{fs, path::Path};

use model::{ModelConfig, expected_tensors};
use serde_json::{Value, json};

use crate::{finish, omnictl};

/// Set to write the snapshots instead of comparing with them.
const UPDATE_VARIABLE: &str = "OMNI_UPDATE_SNAPSHOTS";

/// The configs of the published model, without weights.
fn published() -> String {
    let root = integration_tests::workspace_root();
    let folder = root.join("integration-tests/fixtures/published");
    folder.to_str().unwrap().to_owned()
}

async fn plan(arguments: &[&str]) -> crate::Finished {
    let model = published();
    let all = [&["plan", "--model", &model], arguments].concat();
    finish(omnictl(&all)).await
}

async fn plan_json(arguments: &[&str]) -> Value {
    let end = plan(&[arguments, &["-o", "json"]].concat()).await;
    assert_eq!(end.code, Some(0), "{}", end.stderr);
    serde_json::from_str(&end.stdout).unwrap()
}

#[tokio::test]
async fn tables_of_the_published_model_are_the_recorded_ones() {
    let folder = integration_tests::workspace_root().join("integration-tests/tests/cli/snapshots");
    for (name, arguments) in [
        ("plan-1", &["--gpus", "1"][..]),
        ("plan-2-all", &["--gpus", "2", "--memory", "80", "--all"]),
        (
            "plan-4-fp8",
            &["--gpus", "4", "--dtype", "fp8", "--sort-by", "latency"],
        ),
        (
            "plan-8-compare",
            &["--gpus", "8", "--concurrency", "8", "--compare"],
        ),
        (
            "plan-8-rdma",
            &[
                "--gpus",
                "8",
                "--interconnect",
                "rdma",
                "--size",
                "1280x768",
                "--top",
                "5",
            ],
        ),
    ] {
        let end = plan(arguments).await;
        assert_eq!(end.code, Some(0), "{name}: {}", end.stderr);
        let path = folder.join(format!("{name}.txt"));
        if std::env::var_os(UPDATE_VARIABLE).is_some() {
            fs::write(&path, &end.stdout).unwrap();
        }
        let recorded = fs::read_to_string(&path).unwrap_or_default();
        assert_eq!(
            end.stdout, recorded,
            "{name}; {UPDATE_VARIABLE}=1 records it anew"
        );
    }
}

/// What is planned for is what would be loaded: the parts that denoise and decode, and no other.
#[tokio::test]
async fn planned_weights_are_those_of_the_tensors_a_worker_loads() {
    let config = ModelConfig::from_dir(Path::new(&published())).unwrap();
    let (mut large, mut rest, mut vae) = (0_u64, 0_u64, 0_u64);
    for spec in expected_tensors(&config) {
        let elements = spec.shape.iter().product::<usize>() as u64;
        let name = spec.name.as_str();
        let absent = ["lm_head", "model.ln_f", "vae.encoder", "vision_"];
        if absent.iter().any(|part| name.starts_with(part)) {
            continue;
        }
        let in_layer = name.starts_with("model.layers.");
        if name.starts_with("vae.") {
            vae += elements;
        } else if in_layer && name.ends_with("proj.weight") {
            large += elements;
        } else {
            rest += elements;
        }
    }
    for (dtype, bytes) in [("bf16", 2), ("fp8", 1)] {
        let got = plan_json(&["--gpus", "1", "--memory", "200", "--dtype", dtype]).await;
        let memory = &got["plans"][0]["memory"];
        assert_eq!(memory["streamed"], json!(0));
        assert_eq!(
            memory["weights"],
            json!(large * bytes + rest * 2 + vae * 4),
            "{dtype}"
        );
    }
}

#[tokio::test]
async fn json_has_every_way_and_the_reason_of_those_that_do_not_fit() {
    let got = plan_json(&["--gpus", "4", "--memory", "40", "--all"]).await;
    let plans = got["plans"].as_array().unwrap();
    assert_eq!(json!(plans.len()), got["ways"]);
    let fits = |plan: &&Value| plan["misfit"].is_null();
    assert_eq!(json!(plans.iter().filter(fits).count()), got["fitting"]);
    let needed = |plan: &Value| plan["misfit"]["memory"]["needed"].as_u64();
    let there = 40_u64 << 30;
    assert!(
        plans
            .iter()
            .any(|plan| needed(plan).is_some_and(|n| n > there))
    );
    // Those that fit come first, the best of them at the top.
    let rates: Vec<f64> = plans
        .iter()
        .take_while(fits)
        .map(|plan| plan["pictures_per_second"].as_f64().unwrap())
        .collect();
    assert_eq!(json!(rates.len()), got["fitting"]);
    assert!(rates.is_sorted_by(|a, b| a >= b) && !rates.is_empty());
}

#[tokio::test]
async fn a_distilled_model_or_no_guidance_has_one_row_and_no_guidance_ranks() {
    let got = plan_json(&["--gpus", "2", "--guidance", "1", "--all"]).await;
    assert_eq!(got["rows"], json!(1));
    for plan in got["plans"].as_array().unwrap() {
        let spread = plan["candidate"]["plan"]["cfg"] == json!(2);
        assert_eq!(
            spread,
            plan["misfit"] == json!("one_row"),
            "{}",
            plan["plan"]
        );
    }
    let directory = tempfile::tempdir().unwrap();
    let text = fs::read_to_string(Path::new(&published()).join("config.json")).unwrap();
    let mut config: Value = serde_json::from_str(&text).unwrap();
    config["cfg_distilled"] = json!(true);
    let path = directory.path().join("config.json");
    fs::write(&path, config.to_string()).unwrap();
    let path = path.to_str().unwrap();
    let end = finish(omnictl(&[
        "plan", "--model", path, "--gpus", "2", "-o", "json",
    ]))
    .await;
    let got: Value = serde_json::from_str(&end.stdout).unwrap();
    // Without a generation config beside it, the defaults hold.
    assert_eq!((&got["rows"], &got["guidance"]), (&json!(1), &json!(7.5)));
    assert!(!end.stdout.contains("cfg=2"));
}

#[tokio::test]
async fn bad_questions_are_refused_and_the_flag_is_named() {
    for (flag, bad, code) in [
        ("--gpus", &["--gpus", "0"][..], 2),
        ("--gpus", &[], 2),
        ("--memory", &["--gpus", "1", "--memory", "0"], 2),
        ("--memory", &["--gpus", "1", "--memory", "5"], 64),
        ("--size", &["--gpus", "1", "--size", "1000x1024"], 64),
        ("--size", &["--gpus", "1", "--size", "1024"], 64),
        ("--size", &["--gpus", "1", "--size", "65536x65536"], 64),
        ("--guidance", &["--gpus", "1", "--guidance", "NaN"], 64),
        ("--steps", &["--gpus", "1", "--steps", "0"], 2),
        ("--concurrency", &["--gpus", "1", "--concurrency", "0"], 2),
        ("--dtype", &["--gpus", "1", "--dtype", "int4"], 2),
        (
            "--interconnect",
            &["--gpus", "1", "--interconnect", "rope"],
            2,
        ),
    ] {
        let end = plan(bad).await;
        assert_eq!(end.code, Some(code), "{bad:?}: {}", end.stderr);
        assert!(
            end.stderr.contains(flag) && end.stdout.is_empty(),
            "{}",
            end.stderr
        );
    }
}

#[tokio::test]
async fn a_bad_config_is_refused_by_file_and_field() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("config.json");
    let text = fs::read_to_string(Path::new(&published()).join("config.json")).unwrap();
    let good: Value = serde_json::from_str(&text).unwrap();
    for (field, value) in [
        ("hidden_size", Value::Null),
        ("num_experts", json!([64, 64])),
        ("moe_topk", json!(65)),
        ("vocab_size", json!(0)),
        ("num_hidden_layers", json!(1_000_000)),
    ] {
        let mut config = good.clone();
        config[field] = value;
        fs::write(&path, config.to_string()).unwrap();
        let model = directory.path().to_str().unwrap();
        let end = finish(omnictl(&["plan", "--model", model, "--gpus", "1"])).await;
        assert_eq!(end.code, Some(64), "{field}: {}", end.stderr);
        let named = end.stderr.contains(field) || end.stderr.contains("invalid type: null");
        assert!(
            named && end.stderr.contains("config.json"),
            "{}",
            end.stderr
        );
    }
    let end = finish(omnictl(&["plan", "--model", "/nowhere", "--gpus", "1"])).await;
    assert_eq!(end.code, Some(64));
    assert!(
        end.stderr.contains("--model") && end.stderr.contains("/nowhere"),
        "{}",
        end.stderr
    );
}
