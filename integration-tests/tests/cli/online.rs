//! Against the fake router.
use std::time::Duration;

use proto::v1::SizePolicy;
use serde_json::Value;
use tokio::{
    io::{AsyncBufReadExt as _, BufReader},
    process::Command,
};

use crate::{
    COMMAND_DEADLINE,
    fake::{Fake, PNG},
    file_names, finish, omnictl,
};

/// `omnictl generate PROMPT` in a directory of its own.
fn generate(fake: &Fake, directory: &tempfile::TempDir, words: &[&str]) -> Command {
    let mut command = omnictl(&["generate"]);
    command
        .args(words)
        .args(["--endpoint", &fake.endpoint])
        .current_dir(directory.path());
    command
}

#[tokio::test]
async fn the_picture_is_written_whole_and_the_effective_values_printed() {
    let (fake, directory) = (Fake::start().await, tempfile::tempdir().unwrap());
    let end = finish(generate(
        &fake,
        &directory,
        &["a boat", "--seed", "7", "-o", "b.png"],
    ))
    .await;
    assert_eq!(end.code, Some(0), "{}", end.stderr);
    assert_eq!(file_names(directory.path()), ["b.png"]);
    assert_eq!(std::fs::read(directory.path().join("b.png")).unwrap(), PNG);
    for word in ["b.png", "256x192", "seed 7", "2 steps", "total 12 ms"] {
        assert!(end.stdout.contains(word), "{word} is not in {}", end.stdout);
    }
    assert!(
        end.stderr.is_empty(),
        "no progress without a terminal: {}",
        end.stderr
    );
}

#[tokio::test]
async fn quiet_prints_nothing() {
    let (fake, directory) = (Fake::start().await, tempfile::tempdir().unwrap());
    let end = finish(generate(&fake, &directory, &["a boat", "--quiet"])).await;
    assert_eq!(
        (end.code, end.stdout.as_str(), end.stderr.as_str()),
        (Some(0), "", "")
    );
    assert_eq!(file_names(directory.path()), ["out.png"]);
}

#[tokio::test]
async fn every_event_is_one_json_line() {
    let (fake, directory) = (Fake::start().await, tempfile::tempdir().unwrap());
    let end = finish(generate(&fake, &directory, &["a boat", "--json"])).await;
    assert_eq!(end.code, Some(0), "{}", end.stderr);
    let events: Vec<Value> = end
        .stdout
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let names: Vec<_> = events
        .iter()
        .map(|event| event["event"].as_str().unwrap())
        .collect();
    assert_eq!(
        names,
        ["accepted", "queued", "step", "step", "image", "done"]
    );
    assert_eq!(
        (&events[0]["width"], &events[0]["seed"]),
        (&256.into(), &4711.into())
    );
    assert_eq!(events[4]["bytes"], PNG.len());
    assert_eq!(events[5]["timings"]["transport"], "posix");
}

#[tokio::test]
async fn every_option_reaches_the_server() {
    let (fake, directory) = (Fake::start().await, tempfile::tempdir().unwrap());
    let words = [
        "a boat",
        "--size",
        "512x256",
        "--size-policy",
        "snap",
        "--steps",
        "9",
        "--seed",
        "5",
        "--guidance",
        "2.5",
        "--template",
        "instruct",
        "--system-prompt",
        "be kind",
        "--request-id",
        "r1",
        "--model",
        "m",
    ];
    assert_eq!(
        finish(generate(&fake, &directory, &words)).await.code,
        Some(0)
    );
    let seen = fake.seen.lock().unwrap();
    let request = &seen.generated[0];
    assert_eq!(request.request_id, "r1");
    assert_eq!(
        (request.prompt.as_str(), request.size.as_str()),
        ("a boat", "512x256")
    );
    assert_eq!(request.size_policy(), SizePolicy::Snap);
    assert_eq!((request.steps, request.seed), (Some(9), Some(5)));
    assert_eq!(request.guidance, Some(2.5));
    assert_eq!(request.template, "instruct");
    assert_eq!(
        (request.system_prompt.as_str(), request.model.as_str()),
        ("be kind", "m")
    );
}

#[tokio::test]
async fn a_refused_request_exits_64_names_the_field_and_leaves_no_file() {
    let (fake, directory) = (Fake::start().await, tempfile::tempdir().unwrap());
    for steps in ["0", "-1", "201"] {
        let end = finish(generate(&fake, &directory, &["a boat", "--steps", steps])).await;
        assert_eq!(end.code, Some(64), "{steps}");
        assert_eq!(
            end.stderr,
            "error: steps: must be 1 to 200 (INVALID_ARGUMENT)\n"
        );
        assert!(end.stdout.is_empty() && file_names(directory.path()).is_empty());
    }
}

#[tokio::test]
async fn an_outage_exits_69_before_and_during_the_run() {
    let (fake, directory) = (Fake::start().await, tempfile::tempdir().unwrap());
    for (prompt, reason) in [("busy", "no dit-worker"), ("lost", "dit-worker left")] {
        let end = finish(generate(&fake, &directory, &[prompt])).await;
        assert_eq!(end.code, Some(69), "{prompt}: {}", end.stderr);
        assert!(end.stderr.contains(reason), "{}", end.stderr);
        assert!(file_names(directory.path()).is_empty());
    }
}

#[tokio::test]
async fn a_stream_that_ends_early_is_an_error_and_keeps_the_old_file() {
    let (fake, directory) = (Fake::start().await, tempfile::tempdir().unwrap());
    std::fs::write(directory.path().join("out.png"), "yesterday").unwrap();
    let end = finish(generate(&fake, &directory, &["cut"])).await;
    assert_eq!(end.code, Some(1), "{}", end.stderr);
    assert_eq!(file_names(directory.path()), ["out.png"]);
    assert_eq!(
        std::fs::read(directory.path().join("out.png")).unwrap(),
        b"yesterday"
    );
}

#[tokio::test]
async fn ctrl_c_cancels_the_request_at_the_server() {
    let (fake, directory) = (Fake::start().await, tempfile::tempdir().unwrap());
    let words = ["slow", "--json", "--request-id", "r9"];
    let mut child = generate(&fake, &directory, &words).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let first = tokio::time::timeout(COMMAND_DEADLINE, lines.next_line())
        .await
        .unwrap()
        .unwrap();
    assert!(first.unwrap().contains("accepted"));
    // The shell's own kill: a minimal system has no other.
    let signal = format!("kill -INT {}", child.id().unwrap());
    assert!(
        Command::new("sh")
            .args(["-c", &signal])
            .status()
            .await
            .unwrap()
            .success()
    );
    let status = tokio::time::timeout(COMMAND_DEADLINE, child.wait())
        .await
        .unwrap()
        .unwrap();
    assert_eq!(status.code(), Some(1));
    assert_eq!(fake.seen.lock().unwrap().cancelled, ["r9"]);
    assert!(file_names(directory.path()).is_empty());
}

#[tokio::test]
async fn a_deadline_ends_a_request_that_hangs() {
    let (fake, directory) = (Fake::start().await, tempfile::tempdir().unwrap());
    let ended = finish(generate(&fake, &directory, &["slow", "--timeout", "1"]));
    let end = tokio::time::timeout(Duration::from_secs(30), ended)
        .await
        .unwrap();
    assert_eq!(end.code, Some(1), "{}", end.stderr);
    assert!(end.stderr.contains("DEADLINE_EXCEEDED"), "{}", end.stderr);
}

#[tokio::test]
async fn admin_commands_print_tables_and_json() {
    let fake = Fake::start().await;
    let run = |words: &'static [&'static str]| {
        let mut command = omnictl(words);
        command.env("OMNI_ENDPOINT", &fake.endpoint);
        finish(command)
    };
    let members = run(&["get", "members"]).await;
    assert!(members.stdout.contains("dit-worker") && members.stdout.contains("2+1/4"));
    let members: Value =
        serde_json::from_str(&run(&["get", "members", "-o", "json"]).await.stdout).unwrap();
    assert_eq!(
        (&members["epoch"], &members["members"][0]["state"]),
        (&3.into(), &"ready".into())
    );
    assert!(run(&["version"]).await.stdout.contains("9.9.9"));
    let unknown = run(&["get", "request", "unknown"]).await;
    assert!(unknown.code == Some(1) && unknown.stderr.contains("NOT_FOUND"));
    assert!(run(&["cancel", "r1"]).await.stdout.contains("r1 cancelled"));
    assert!(
        run(&["cancel", "ended"])
            .await
            .stdout
            .contains("already ended")
    );
    assert_eq!(run(&["drain", "m1"]).await.code, Some(0));
    assert_eq!(fake.seen.lock().unwrap().drained, ["m1"]);
    assert!(
        run(&["cordon", "m1", "m2"])
            .await
            .stdout
            .contains("m2 cordoned")
    );
    assert_eq!(run(&["uncordon", "m1"]).await.code, Some(0));
    let seen = fake.seen.lock().unwrap();
    let cordons: Vec<_> = seen
        .cordoned
        .iter()
        .map(|(id, set)| (id.as_str(), *set))
        .collect();
    assert_eq!(cordons, [("m1", true), ("m2", true), ("m1", false)]);
}
