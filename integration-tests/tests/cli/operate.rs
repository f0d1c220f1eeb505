//! What operators see: every command on the fake cluster, as recorded; contexts, checks, delegation.
use std::{fs, time::Duration};

use serde_json::Value;
use tokio::io::{AsyncBufReadExt as _, BufReader};

use crate::{COMMAND_DEADLINE, Finished, fake::Fake, finish, omnictl};

/// Set to write the snapshots instead of comparing with them.
const UPDATE_VARIABLE: &str = "OMNI_UPDATE_SNAPSHOTS";

async fn run(fake: &Fake, words: &[&str]) -> Finished {
    let mut command = omnictl(words);
    command.env("OMNI_ENDPOINT", &fake.endpoint);
    finish(command).await
}

/// What is printed is what was recorded; the address of the fake is another one each time.
fn assert_recorded(name: &str, endpoint: &str, printed: &str) {
    let folder = integration_tests::workspace_root().join("integration-tests/tests/cli/snapshots");
    let path = folder.join(format!("{name}.txt"));
    let printed = printed.replace(endpoint, "ENDPOINT");
    if std::env::var_os(UPDATE_VARIABLE).is_some() {
        fs::write(&path, &printed).unwrap();
    }
    let recorded = fs::read_to_string(&path).unwrap_or_default();
    assert_eq!(
        printed, recorded,
        "{name}; {UPDATE_VARIABLE}=1 records it anew"
    );
}

#[tokio::test]
async fn every_view_of_a_cluster_is_the_recorded_one() {
    let fake = Fake::start().await;
    for (name, words) in [
        ("get-members", &["get", "members"][..]),
        (
            "get-members-wide",
            &["get", "members", "-o", "wide", "--sort-by", "LOAD"],
        ),
        ("get-members-yaml", &["get", "member", "m1", "-o", "yaml"]),
        (
            "get-members-name",
            &[
                "get",
                "members",
                "-l",
                "role=dit-worker,cordoned!=true",
                "-o",
                "name",
            ],
        ),
        ("get-pools", &["get", "pools", "-o", "wide"]),
        ("get-plans", &["get", "plans"]),
        ("get-requests", &["get", "requests", "--sort-by", "age"]),
        (
            "get-requests-wide",
            &["get", "requests", "r1", "-o", "wide"],
        ),
        ("describe-member", &["describe", "member", "m2"]),
        ("describe-request", &["describe", "request", "r1"]),
        ("explain", &["explain", "r1"]),
        ("explain-failed", &["explain", "r0"]),
        ("trace", &["trace", "r1"]),
        ("events", &["events"]),
        ("events-warnings", &["events", "--warnings", "--after", "2"]),
        ("top", &["top", "--once"]),
    ] {
        let end = run(&fake, words).await;
        assert_eq!(end.code, Some(0), "{name}: {}", end.stderr);
        assert_recorded(name, &fake.endpoint, &end.stdout);
    }
}

#[tokio::test]
async fn what_cannot_be_listed_so_exits_64_and_names_it() {
    let fake = Fake::start().await;
    for (words, named) in [
        (&["get", "members", "-l", "colour=red"][..], "selector"),
        (&["get", "members", "-l", "red"], "selector"),
        (&["get", "members", "--sort-by", "colour"], "sort-by"),
    ] {
        let end = run(&fake, words).await;
        assert_eq!(end.code, Some(64), "{words:?}: {}", end.stderr);
        assert!(
            end.stderr.contains(named) && end.stdout.is_empty(),
            "{}",
            end.stderr
        );
    }
    for words in [
        &["get", "members", "nobody"][..],
        &["explain", "nobody"],
        &["describe", "pool", "x"],
    ] {
        let end = run(&fake, words).await;
        assert_eq!(end.code, Some(1), "{words:?}");
        assert!(end.stderr.contains("NOT_FOUND"), "{}", end.stderr);
    }
    assert_eq!(run(&fake, &["get", "boats"]).await.code, Some(2));
}

#[tokio::test]
async fn json_has_everything_and_nothing_that_is_empty_is_a_failure() {
    let fake = Fake::start().await;
    let end = run(&fake, &["trace", "r1", "-o", "json"]).await;
    let trace: Value = serde_json::from_str(&end.stdout).unwrap();
    assert_eq!(trace["spans"].as_array().unwrap().len(), 10);
    let end = run(&fake, &["explain", "r1", "-o", "json"]).await;
    let record: Value = serde_json::from_str(&end.stdout).unwrap();
    assert_eq!(
        record["placements"][1]["passed_over"][0]["reason"],
        "cordoned"
    );
    let lines = run(&fake, &["events", "-o", "json"]).await.stdout;
    assert_eq!(lines.lines().count(), 4);
    let none = run(&fake, &["get", "members", "-l", "role=router"]).await;
    assert_eq!((none.code, none.stdout.as_str()), (Some(0), ""));
    assert!(none.stderr.contains("no members"), "{}", none.stderr);
}

/// A watch prints the list at once; it ends with the test, which drops the child.
#[tokio::test]
async fn a_watch_goes_on_after_its_first_list() {
    let fake = Fake::start().await;
    let mut command = omnictl(&["get", "members", "-w"]);
    command.env("OMNI_ENDPOINT", &fake.endpoint);
    let mut child = command.spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    for _ in 0..4 {
        let line = tokio::time::timeout(COMMAND_DEADLINE, lines.next_line()).await;
        assert!(line.unwrap().unwrap().is_some());
    }
    // Nothing changes: no further line comes, and it has not ended.
    let more = tokio::time::timeout(Duration::from_millis(1500), lines.next_line()).await;
    assert!(more.is_err(), "{more:?}");
    assert!(child.try_wait().unwrap().is_none());
    child.kill().await.unwrap();
}

#[tokio::test]
async fn a_drain_that_is_waited_for_ends_with_its_timeout_and_says_what_is_left() {
    let fake = Fake::start().await;
    let end = run(&fake, &["drain", "m1", "--wait", "--timeout", "1"]).await;
    assert_eq!(end.code, Some(1));
    assert!(
        end.stderr.contains("m1 drains: 2 running, 1 waiting"),
        "{}",
        end.stderr
    );
    assert!(end.stderr.contains("DEADLINE_EXCEEDED"), "{}", end.stderr);
    let end = run(&fake, &["drain", "gone", "--wait"]).await;
    assert_eq!(
        (end.code, end.stdout.as_str()),
        (Some(0), "gone has left\n")
    );
}

#[tokio::test]
async fn a_context_with_certificates_has_all_of_them_and_an_address_that_says_so() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("omnictl.toml");
    let set = |url: &str, more: &[&str]| {
        let mut command = omnictl(&["config", "set-context", "x", "--url"]);
        command
            .arg(url)
            .args(more)
            .env("OMNICTL_CONFIG", &file)
            .current_dir(dir.path());
        finish(command)
    };
    let secure = "https://127.0.0.1:1";
    let files = ["--tls-ca", "a", "--tls-cert", "c", "--tls-key", "k"];
    for (url, more, said) in [
        (
            secure,
            &files[..0],
            "url must be http://HOST:PORT, as TLS is off",
        ),
        (secure, &files[2..], "tls_cert needs tls_ca"),
        (secure, &files[..4], "go together"),
        (
            "http://127.0.0.1:1",
            &files[..],
            "url must be https://HOST:PORT, as TLS is on",
        ),
    ] {
        let refused = set(url, more).await;
        assert_eq!(refused.code, Some(64));
        assert!(refused.stderr.contains(said), "{}", refused.stderr);
    }
    assert_eq!(set(secure, &files).await.code, Some(0));
    // The same files from wherever it is used, and their names alone are kept.
    let text = fs::read_to_string(&file).unwrap();
    let whole = dir.path().canonicalize().unwrap().join("k");
    assert!(
        text.contains(&format!("tls_key = \"{}\"", whole.display())),
        "{text}"
    );
    let mut used = omnictl(&["get", "pools"]);
    used.env("OMNICTL_CONFIG", &file);
    let end = finish(used).await;
    assert_eq!(end.code, Some(64));
    assert!(end.stderr.contains("tls_ca"), "{}", end.stderr);
}

#[tokio::test]
async fn contexts_name_clusters_and_flags_and_the_environment_beat_them() {
    let (fake, dir) = (Fake::start().await, tempfile::tempdir().unwrap());
    let file = dir.path().join("deep/omnictl.toml");
    let config = |words: &'static [&'static str]| {
        let mut command = omnictl(words);
        command.env("OMNICTL_CONFIG", &file);
        command
    };
    let none = finish(config(&["config", "current-context"])).await;
    assert_eq!(none.code, Some(1));
    let mut set = config(&["config", "set-context", "blue", "--url"]);
    set.arg(&fake.endpoint);
    assert_eq!(finish(set).await.code, Some(0));
    let dead = config(&[
        "config",
        "set-context",
        "dead",
        "--url",
        "http://127.0.0.1:1",
    ]);
    assert_eq!(finish(dead).await.code, Some(0));
    // The first context is the current one.
    assert_eq!(
        finish(config(&["config", "current-context"])).await.stdout,
        "blue\n"
    );
    assert_eq!(finish(config(&["get", "pools"])).await.code, Some(0));
    assert_eq!(
        finish(config(&["get", "pools", "--context", "dead"]))
            .await
            .code,
        Some(69)
    );
    assert_eq!(
        finish(config(&["config", "use-context", "dead"]))
            .await
            .code,
        Some(0)
    );
    assert_eq!(finish(config(&["get", "pools"])).await.code, Some(69));
    let mut environment = config(&["get", "pools"]);
    environment.env("OMNI_ENDPOINT", &fake.endpoint);
    assert_eq!(finish(environment).await.code, Some(0));
    let mut flag = config(&["get", "pools", "--endpoint", "http://127.0.0.1:1"]);
    flag.env("OMNI_ENDPOINT", &fake.endpoint);
    assert_eq!(finish(flag).await.code, Some(69));

    let list = finish(config(&["config", "get-contexts"])).await;
    assert_recorded("config-get-contexts", &fake.endpoint, &list.stdout);
    let unknown = finish(config(&["get", "pools", "--context", "green"])).await;
    assert_eq!(unknown.code, Some(64));
    assert!(unknown.stderr.contains("blue, dead"), "{}", unknown.stderr);
    let bad = finish(config(&["config", "set-context", "x", "--url", "nowhere"])).await;
    assert_eq!(bad.code, Some(64));
    assert_eq!(
        finish(config(&["config", "delete-context", "dead"]))
            .await
            .code,
        Some(0)
    );
    assert_eq!(
        finish(config(&["config", "current-context"])).await.code,
        Some(1)
    );
    fs::write(&file, "colour = 1").unwrap();
    assert_eq!(finish(config(&["config", "view"])).await.code, Some(64));
}

#[tokio::test]
async fn a_check_says_what_is_wrong_with_a_hint_and_exits_1() {
    let fake = Fake::start().await;
    let checkpoint = integration_tests::cluster::model_dir();
    let checkpoint = checkpoint.to_str().unwrap();
    // The fake has no KV-transfer service, and tells neither version nor time of ours.
    let words = ["check", "--ports", "1", "--model", checkpoint, "-o", "json"];
    let end = run(&fake, &words).await;
    assert_eq!(end.code, Some(1), "{}", end.stderr);
    let report: Value = serde_json::from_str(&end.stdout).unwrap();
    let of = |name: &str| {
        let all = report["checks"].as_array().unwrap();
        all.iter()
            .find(|check| check["check"] == name)
            .unwrap()
            .clone()
    };
    for (name, outcome) in [
        ("router", "ok"),
        ("version", "failed"),
        ("clock", "skipped"),
        ("registry", "ok"),
        ("ar-stage", "ok"),
        ("kv-transfer", "failed"),
        ("dit-worker", "ok"),
        ("etcd", "skipped"),
        ("weights", "ok"),
    ] {
        assert_eq!(of(name)["outcome"], outcome, "{}", of(name));
        assert_eq!(of(name)["hint"] == "", outcome != "failed", "{}", of(name));
    }
    let text = run(&fake, &["check", "--ports", "1"]).await;
    assert!(
        text.stdout.contains("× kv-transfer") && text.stdout.contains("✓ registry"),
        "{}",
        text.stdout
    );
    assert!(
        text.stderr.contains("of the checks failed"),
        "{}",
        text.stderr
    );
    let missing = finish(omnictl(&["check", "--local", "--model", "/nowhere"])).await;
    assert_eq!(missing.code, Some(1));
    assert!(
        missing.stdout.contains("× weights") && !missing.stdout.contains("router "),
        "{}",
        missing.stdout
    );
}

#[tokio::test]
async fn what_is_the_servers_program_is_handed_to_it() {
    let mut bench = omnictl(&["bench", "denoise", "--size", "7"]);
    bench.env("OMNI_BIN", "/bin/echo");
    assert_eq!(finish(bench).await.stdout, "bench denoise --size 7\n");
    let mut simulate = omnictl(&["simulate", "--help"]);
    simulate.env("OMNI_BIN", "/bin/echo");
    let end = finish(simulate).await;
    assert_eq!(
        (end.code, end.stdout.as_str()),
        (Some(0), "simulate --help\n")
    );
    let mut nobody = omnictl(&["bench"]);
    nobody.env("OMNI_BIN", "/nowhere/omni");
    let end = finish(nobody).await;
    assert_eq!(end.code, Some(69));
    assert!(end.stderr.contains("OMNI_BIN"), "{}", end.stderr);
}

#[tokio::test]
async fn there_is_a_manual_page_for_every_command() {
    let dir = tempfile::tempdir().unwrap();
    let end = finish(omnictl(&["man", "--dir", dir.path().to_str().unwrap()])).await;
    assert_eq!(end.code, Some(0), "{}", end.stderr);
    let page = |name: &str| fs::read_to_string(dir.path().join(name)).unwrap();
    assert!(page("omnictl.1").contains("Exit codes"));
    for command in [
        "get",
        "explain",
        "check",
        "config-use-context",
        "top",
        "edit",
    ] {
        assert!(
            page(&format!("omnictl-{command}.1")).starts_with(".ie"),
            "{command}"
        );
    }
    assert!(
        finish(omnictl(&["man"]))
            .await
            .stdout
            .contains(".TH omnictl")
    );
}
