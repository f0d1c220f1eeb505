//! Without a server.
use crate::{file_names, finish, omnictl};

/// A port nobody listens on.
fn dead_endpoint() -> String {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    format!("http://{}", listener.local_addr().unwrap())
}

#[tokio::test]
async fn a_bad_command_line_exits_2_and_says_why() {
    for bad in [
        &["generate"][..],
        &["frobnicate"],
        &["generate", "x", "--steps", "many"],
    ] {
        let end = finish(omnictl(bad)).await;
        assert_eq!(end.code, Some(2), "{bad:?}: {}", end.stderr);
        assert!(end.stdout.is_empty() && !end.stderr.is_empty());
    }
}

#[tokio::test]
async fn help_and_version_exit_0_on_stdout() {
    for good in [&["--help"][..], &["generate", "--help"], &["--version"]] {
        let end = finish(omnictl(good)).await;
        assert_eq!(end.code, Some(0), "{good:?}");
        assert!(!end.stdout.is_empty() && end.stderr.is_empty());
    }
}

#[tokio::test]
async fn completions_name_every_command() {
    for shell in ["bash", "zsh", "fish"] {
        let end = finish(omnictl(&["completions", shell])).await;
        assert_eq!(end.code, Some(0));
        for word in ["generate", "drain", "cancel", "members", "size-policy"] {
            assert!(end.stdout.contains(word), "{shell} completion lacks {word}");
        }
    }
}

#[tokio::test]
async fn no_server_exits_69_names_the_address_and_leaves_no_file() {
    let directory = tempfile::tempdir().unwrap();
    let endpoint = dead_endpoint();
    let mut command = omnictl(&["generate", "a boat", "--endpoint", &endpoint]);
    command.current_dir(directory.path());
    let end = finish(command).await;
    assert_eq!(end.code, Some(69), "{}", end.stderr);
    assert!(
        end.stderr.starts_with("error: ") && end.stderr.contains(&endpoint),
        "{}",
        end.stderr
    );
    assert_eq!(end.stderr.lines().count(), 1);
    assert!(file_names(directory.path()).is_empty());
}

#[tokio::test]
async fn the_endpoint_comes_from_the_flag_before_the_environment() {
    let endpoint = dead_endpoint();
    let mut command = omnictl(&["get", "members"]);
    command.env("OMNI_ENDPOINT", &endpoint);
    let end = finish(command).await;
    assert!(
        end.code == Some(69) && end.stderr.contains(&endpoint),
        "{}",
        end.stderr
    );

    let mut command = omnictl(&["get", "members", "--endpoint", &endpoint]);
    command.env("OMNI_ENDPOINT", "http://127.0.0.1:1");
    let end = finish(command).await;
    assert!(
        end.code == Some(69) && end.stderr.contains(&endpoint),
        "{}",
        end.stderr
    );
}

#[tokio::test]
async fn a_bad_endpoint_exits_64_and_names_it() {
    let end = finish(omnictl(&["get", "members", "--endpoint", "nonsense"])).await;
    assert_eq!(end.code, Some(64));
    assert!(end.stderr.contains("endpoint"), "{}", end.stderr);
}

#[tokio::test]
async fn an_unwritable_output_is_refused_before_the_request() {
    let directory = tempfile::tempdir().unwrap();
    let inside = directory.path().join("missing/out.png");
    let (folder, inside) = (directory.path().to_str().unwrap(), inside.to_str().unwrap());
    // Nobody listens: an attempt to connect would exit 69.
    let endpoint = dead_endpoint();
    for (target, reason) in [
        (folder, "directory"),
        (inside, "does not exist"),
        ("/", "no file"),
    ] {
        let end = finish(omnictl(&[
            "generate",
            "x",
            "-o",
            target,
            "--endpoint",
            &endpoint,
        ]))
        .await;
        assert_eq!(end.code, Some(64), "{target}: {}", end.stderr);
        assert!(
            end.stderr.contains(target) && end.stderr.contains(reason),
            "{}",
            end.stderr
        );
    }
    assert!(file_names(directory.path()).is_empty());
}

#[tokio::test]
async fn an_illegal_request_id_exits_64_and_names_the_field() {
    let directory = tempfile::tempdir().unwrap();
    let mut command = omnictl(&["generate", "x", "--request-id", "a b"]);
    command.current_dir(directory.path());
    let end = finish(command).await;
    assert_eq!(end.code, Some(64));
    assert!(end.stderr.contains("request_id"), "{}", end.stderr);
}

#[tokio::test]
async fn version_prints_the_client_even_without_a_server() {
    let endpoint = dead_endpoint();
    let end = finish(omnictl(&["version", "--endpoint", &endpoint])).await;
    assert_eq!(end.code, Some(69));
    assert!(end.stdout.contains(env!("CARGO_PKG_VERSION")));
    let end = finish(omnictl(&["version", "--client", "--endpoint", &endpoint])).await;
    assert_eq!(end.code, Some(0));
}
