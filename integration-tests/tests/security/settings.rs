//! What is refused before a port opens, with a sentence.
use integration_tests::cluster::{command, output};

/// A router with these flags ends with 64 and one sentence that has `said`, and announces no port.
fn refused(flags: &[&str], said: &str) {
    let arguments = [&["router", "--listen", "127.0.0.1:0"][..], flags].concat();
    // A flag that is given twice is the later one's business.
    let arguments: Vec<_> = match arguments.iter().filter(|a| **a == "--listen").count() {
        2 => [&arguments[..1], &arguments[3..]].concat(),
        _ => arguments,
    };
    let ended = output(&arguments);
    let error = String::from_utf8(ended.stderr).unwrap();
    assert_eq!(ended.status.code(), Some(64), "{arguments:?}: {error}");
    assert_eq!(error.lines().count(), 1, "{error}");
    assert!(error.contains(said), "{error}");
    assert!(ended.stdout.is_empty(), "a port was announced");
}

#[test]
fn bad_security_settings_end_the_process_with_64_and_one_sentence_before_a_port_opens() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).display().to_string();
    let made = output(&["certs", &path("pki")]);
    assert!(
        made.status.success(),
        "{}",
        String::from_utf8_lossy(&made.stderr)
    );
    let file = |name: &str| path(&format!("pki/{name}"));
    let (ca, cert, key) = (file("ca.pem"), file("router.pem"), file("router.key"));
    let other = file("client.key");
    std::fs::write(
        path("keys.toml"),
        "[[key]]\nsha256 = \"00\"\ntenant = \"a\"\n",
    )
    .unwrap();
    let keys = path("keys.toml");
    let tls = ["--tls-cert", &cert, "--tls-key", &key, "--tls-ca", &ca];
    let wrong = ["--tls-cert", &cert, "--tls-key", &other, "--tls-ca", &ca];
    for (arguments, said) in [
        (
            &["--listen", "0.0.0.0:0"][..],
            "listen \"0.0.0.0:0\" is not on this machine alone",
        ),
        (&["--tls", "on"], "tls_cert is required, because tls is on"),
        (&tls[..4], "tls_cert needs tls_ca as well"),
        (&wrong, "tls_cert and tls_key: "),
        (
            &["--api-keys", &keys],
            "key 1: sha256 must be the digest of a key",
        ),
        (
            &["--otlp-endpoint", "collector"],
            "otlp_endpoint must be http://HOST:PORT",
        ),
        (
            &[
                "--registry",
                "http://127.0.0.1:1",
                tls[0],
                tls[1],
                tls[2],
                tls[3],
                tls[4],
                tls[5],
            ],
            "registry must be https://HOST:PORT, as TLS is on",
        ),
    ] {
        refused(arguments, said);
    }
    let good = [&["config", "show", "router"][..], &tls].concat();
    let shown = output(&good);
    assert!(
        shown.status.success(),
        "{}",
        String::from_utf8_lossy(&shown.stderr)
    );
    let shown = String::from_utf8(shown.stdout).unwrap();
    assert!(
        shown.contains(&format!("tls_key = \"{key}\" # flag")),
        "{shown}"
    );
    assert!(
        !shown.contains("BEGIN"),
        "a file's name, never what it holds: {shown}"
    );
}

#[test]
fn an_admin_port_that_others_reach_needs_certificates_or_a_word() {
    for (arguments, said) in [
        (
            ["--admin-listen", "0.0.0.0:0"],
            "admin_listen \"0.0.0.0:0\" is not on this machine alone",
        ),
        (
            ["--admin-tls", "mutual"],
            "admin_tls is mutual, which needs tls_cert, tls_key and tls_ca",
        ),
    ] {
        refused(&arguments, said);
    }
}

#[test]
fn a_flag_beats_a_variable_beats_the_file_beats_the_default_and_each_says_so() {
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("omni.toml");
    std::fs::write(
        &config,
        "[router]\nmax_running = 3\nmax_queued = 4\npool = \"file\"\n",
    )
    .unwrap();
    let shown = command(&["config", "show", "router", "--max-running", "1", "--config"])
        .arg(&config)
        .env("OMNI_MAX_RUNNING", "2")
        .env("OMNI_MAX_QUEUED", "5")
        .output()
        .unwrap();
    let text = String::from_utf8(shown.stdout).unwrap();
    assert!(
        shown.status.success(),
        "{}",
        String::from_utf8_lossy(&shown.stderr)
    );
    for line in [
        "max_running = \"1\" # flag",
        "max_queued = \"5\" # environment",
        "pool = \"file\" # file",
        "tls = \"auto\" # default",
    ] {
        assert!(
            text.lines().any(|shown| shown == line),
            "no {line} in\n{text}"
        );
    }
    // What is shown is a config file that means the same.
    std::fs::write(&config, &text).unwrap();
    let again = command(&["config", "show", "router", "--config"])
        .arg(&config)
        .output()
        .unwrap();
    let again = String::from_utf8(again.stdout).unwrap();
    let values = |text: &str| {
        let lines = text
            .lines()
            .map(|line| line.split(" # ").next().unwrap().to_owned());
        lines.collect::<Vec<_>>()
    };
    assert_eq!(values(&again), values(&text));
    for (broken, said) in [
        (
            "[router]\nmax_runing = 1\n",
            "unknown key max_runing in [router]",
        ),
        ("[rooter]\n", "unknown section [rooter]"),
    ] {
        std::fs::write(&config, broken).unwrap();
        let refused = command(&["router", "--config"])
            .arg(&config)
            .output()
            .unwrap();
        let error = String::from_utf8(refused.stderr).unwrap();
        assert_eq!(refused.status.code(), Some(64), "{error}");
        assert!(
            error.contains(said) && error.lines().count() == 1,
            "{error}"
        );
    }
}
