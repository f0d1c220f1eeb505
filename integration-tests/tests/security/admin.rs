//! The admin ports: who may look at metrics and at the status page, and who may draw there.
use axum::{
    body::Body,
    http::{Request, StatusCode, header::AUTHORIZATION},
};
use integration_tests::{
    cluster::{Up, output},
    web::{Answer, get, post, send_on},
};
use proto::access::Role;
use serde_json::{Value, json};

use super::pki::Pki;

struct Ports {
    up: Up,
    pki: Pki,
    key: String,
    _dir: tempfile::TempDir,
}

/// A cluster whose router has the default, whose AR stage is in clear, and whose worker asks for certificates.
fn start() -> Ports {
    let made = output(&["api-key", "acme"]);
    let key = String::from_utf8(made.stderr).unwrap().trim().to_owned();
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        let path = dir.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.display().to_string()
    };
    let keys = file("keys.toml", &String::from_utf8(made.stdout).unwrap());
    let text = format!(
        "[router]\napi_keys = \"{keys}\"\n[ar_stage]\nadmin_tls = \"off\"\n[dit_worker]\nadmin_tls = \"mutual\"\n"
    );
    let config = file("omni.toml", &text);
    let pki = Pki::new();
    let tls = pki.dir().to_str().unwrap();
    let up = Up::start_with("shm", &["--tls-dir", tls, "--config", &config]);
    Ports {
        up,
        pki,
        key,
        _dir: dir,
    }
}

impl Ports {
    async fn send(&self, role: &str, who: Option<Role>, request: Request<Body>) -> Answer {
        let site = self.up.admin(role);
        assert!(site.starts_with("https://"), "{role}: {site}");
        let stream = self.pki.connect_as(who, &site).await;
        send_on(stream, &site, request).await
    }

    async fn get(&self, role: &str, who: Option<Role>, path: &str) -> Answer {
        let request = Request::get(path).body(Body::empty()).unwrap();
        self.send(role, who, request).await
    }

    fn with_key(&self, mut request: Request<Body>) -> Request<Body> {
        let proof = format!("Bearer {}", self.key).parse().unwrap();
        request.headers_mut().insert(AUTHORIZATION, proof);
        request
    }

    async fn draw(&self, who: Option<Role>, keyed: bool) -> Answer {
        let wish = json!({"prompt": "a boat", "size": "256x256", "steps": 2, "previews": 0});
        let request = post("/status/generate", "application/json", wish.to_string());
        let request = match keyed {
            true => self.with_key(request),
            false => request,
        };
        self.send("router", who, request).await
    }
}

/// Probes are for whoever started the process; the rest is as the setting says.
async fn ports_show_what_their_setting_says(ports: &Ports) {
    for role in ["router", "kv-transfer", "dit-worker"] {
        for probe in ["/livez", "/readyz", "/startupz"] {
            let answer = ports.get(role, None, probe).await;
            assert_eq!(answer.status, StatusCode::OK, "{role} {probe}");
        }
    }
    let clear = ports.up.admin("ar-stage");
    assert!(clear.starts_with("http://"), "{clear}");
    assert_eq!(get(&clear, "/metrics").await.status, StatusCode::OK);
    for (role, who, status) in [
        ("kv-transfer", None, StatusCode::OK),
        ("dit-worker", None, StatusCode::UNAUTHORIZED),
        ("dit-worker", Some(Role::ArStage), StatusCode::FORBIDDEN),
        ("dit-worker", Some(Role::Monitor), StatusCode::OK),
        ("dit-worker", Some(Role::Admin), StatusCode::OK),
    ] {
        let answer = ports.get(role, who, "/metrics").await;
        assert_eq!(answer.status, status, "{role} {who:?}: {}", answer.text);
        let shown = answer.text.contains("omni_build_info");
        assert_eq!(shown, status == StatusCode::OK, "{}", answer.text);
    }
}

#[tokio::test]
async fn the_status_page_shows_to_each_what_is_theirs_and_draws_for_who_may_ask_for_images() {
    let ports = start();
    ports_show_what_their_setting_says(&ports).await;
    let cluster = "/status/cluster.json";
    assert_eq!(ports.get("router", None, "/").await.status, StatusCode::OK);
    for who in [None, Some(Role::DitWorker)] {
        for answer in [
            ports.get("router", who, cluster).await,
            ports.get("router", who, "/status/preview/x").await,
            ports.draw(who, false).await,
        ] {
            assert_eq!(answer.status, StatusCode::UNAUTHORIZED, "{}", answer.text);
            assert!(answer.text.contains("API key"), "{}", answer.text);
        }
    }
    // Who only looks does not draw.
    let refused = ports.draw(Some(Role::Monitor), false).await;
    assert_eq!(refused.status, StatusCode::UNAUTHORIZED, "{}", refused.text);
    for drawn in [
        ports.draw(None, true).await,
        ports.draw(Some(Role::Admin), false).await,
        ports.draw(Some(Role::Client), false).await,
    ] {
        assert!(drawn.text.contains(r#""event":"image""#), "{}", drawn.text);
    }

    let seen = |answer: Answer| -> (usize, usize, Value) {
        let now = answer.json();
        let count = |key: &str| now[key].as_array().unwrap().len();
        (count("members"), count("requests"), now["key"].clone())
    };
    let of = |who| ports.get("router", who, cluster);
    assert_eq!(seen(of(Some(Role::Admin)).await), (4, 3, json!(false)));
    assert_eq!(seen(of(Some(Role::Monitor)).await), (4, 3, json!(true)));
    let request = Request::get(cluster).body(Body::empty()).unwrap();
    let tenant = ports.send("router", None, ports.with_key(request)).await;
    assert_eq!(seen(tenant), (0, 1, json!(false)));
    assert!(!ports.up.log().contains(&ports.key), "the key is logged");
}
