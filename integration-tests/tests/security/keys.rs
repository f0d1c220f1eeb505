//! API keys over HTTPS and gRPC, and what of them is seen in logs.
use std::process::Command;

use axum::{
    body::{Body, to_bytes},
    http::{Request, StatusCode, header::AUTHORIZATION, header::CONTENT_TYPE, header::HOST},
};
use hyper_util::rt::TokioIo;
use integration_tests::cluster::{Up, bounded, output};
use serde_json::{Value, json};

use super::pki::Pki;

struct Keyed {
    up: Up,
    pki: Pki,
    key: String,
    digest: String,
    dir: tempfile::TempDir,
}

fn start() -> Keyed {
    let made = output(&["api-key", "acme"]);
    assert!(made.status.success());
    let key = String::from_utf8(made.stderr).unwrap().trim().to_owned();
    let entry = String::from_utf8(made.stdout).unwrap();
    assert!(key.starts_with("omni-") && !entry.contains(&key), "{entry}");
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        let path = dir.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.display().to_string()
    };
    let keys = file("keys.toml", &format!("{entry}priority = \"standard\"\n"));
    let config = file("omni.toml", &format!("[router]\napi_keys = \"{keys}\"\n"));
    file("key", &format!("{key}\n"));
    let pki = Pki::new();
    let tls = pki.dir().to_str().unwrap();
    let arguments = [
        "--tls-dir",
        tls,
        "--config",
        &config,
        "--log-level",
        "debug",
    ];
    let up = Up::start_with("shm", &arguments);
    let digest = entry.split('"').nth(1).unwrap().to_owned();
    Keyed {
        up,
        pki,
        key,
        digest,
        dir,
    }
}

impl Keyed {
    async fn ask(&self, key: Option<&str>, wish: &Value) -> (StatusCode, Value) {
        let site = self.up.http();
        let stream = self.pki.connect(site).await;
        let handshake = hyper::client::conn::http1::handshake(TokioIo::new(stream));
        let (mut sender, connection) = bounded(handshake).await.unwrap();
        base::task::Tracker::new().spawn(connection);
        let mut request = Request::post("/v1/images/generations")
            .header(HOST, site.trim_start_matches("https://"))
            .header(CONTENT_TYPE, "application/json");
        if let Some(key) = key {
            request = request.header(AUTHORIZATION, format!("Bearer {key}"));
        }
        let request = request.body(Body::from(wish.to_string())).unwrap();
        let (head, body) = bounded(sender.send_request(request))
            .await
            .unwrap()
            .into_parts();
        let bytes = bounded(to_bytes(Body::new(body), 1 << 26)).await.unwrap();
        (head.status, serde_json::from_slice(&bytes).unwrap())
    }
}

#[tokio::test]
async fn a_key_opens_both_doors_for_its_tenant_and_is_never_logged() {
    let keyed = start();
    let wish = json!({ "prompt": "a boat", "size": "256x256", "steps": 2, "guidance": 3.0 });
    let (status, body) = keyed.ask(None, &wish).await;
    assert_eq!(status, StatusCode::UNAUTHORIZED, "{body}");
    let (status, body) = keyed.ask(Some("omni-guess"), &wish).await;
    assert_eq!(status, StatusCode::UNAUTHORIZED, "{body}");
    let (status, body) = keyed.ask(Some(&keyed.key), &wish).await;
    assert_eq!(status, StatusCode::OK, "{body}");
    assert!(!body["data"][0]["b64_json"].as_str().unwrap().is_empty());
    let mut urgent = wish.clone();
    urgent["priority"] = "interactive".into();
    let (status, body) = keyed.ask(Some(&keyed.key), &urgent).await;
    assert_eq!(
        (status, &body["error"]["param"]),
        (StatusCode::FORBIDDEN, &"priority".into())
    );

    // omnictl, without a certificate, by its key alone.
    let omnictl = integration_tests::binary("omnictl").unwrap();
    let out = keyed.dir.path().join("out.png");
    let generate = |key: Option<&std::path::Path>| {
        let mut command = Command::new(&omnictl);
        command.args([
            "generate", "a boat", "--size", "256x256", "--steps", "2", "--quiet",
        ]);
        command
            .args(["--endpoint", keyed.up.endpoint()])
            .arg("--tls-ca")
            .arg(keyed.pki.path("ca.pem"));
        command.arg("-o").arg(&out);
        if let Some(key) = key {
            command.arg("--api-key-file").arg(key);
        }
        command.output().unwrap()
    };
    let refused = generate(None);
    let said = String::from_utf8(refused.stderr).unwrap();
    assert!(
        !refused.status.success() && said.contains("API key"),
        "{said}"
    );
    let made = generate(Some(&keyed.dir.path().join("key")));
    assert!(
        made.status.success(),
        "{}",
        String::from_utf8_lossy(&made.stderr)
    );
    assert!(out.exists());

    let log = keyed.up.log();
    for secret in [keyed.key.as_str(), "omni-guess", &keyed.digest] {
        assert!(!log.contains(secret), "a log line holds {secret}");
    }
    assert!(
        log.contains("tenant=\"acme\"") || log.contains("tenant=acme"),
        "{log}"
    );
}
