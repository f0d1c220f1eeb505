//! Who may ask for images, and whose requests one may see: over both doors.
use axum::http::{StatusCode, header::AUTHORIZATION};
use base::Code;
use proto::{
    status::failure,
    v1::{CancelRequest, GenerateRequest, GetRequest, Priority},
};
use registry::Role;
use tonic::Request;

use super::{
    Cluster, bounded, collect,
    fake::{self, Script, Stage},
    http::{IMAGES, answer, post, send, wish},
    request,
};

struct Doors {
    cluster: Cluster,
    /// Of the tenants a and b.
    keys: [String; 2],
    ar: Script,
    _dir: tempfile::TempDir,
    _stages: [Stage; 2],
}

async fn doors() -> Doors {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("keys.toml");
    let (a, first) = crate::new_key("a", &[1; 4]).unwrap();
    let (b, second) = crate::new_key("b", &[2; 4]).unwrap();
    let text = format!("{first}priority = \"standard\"\n{second}max_queued = 1\n");
    std::fs::write(&path, text).unwrap();
    let cluster = Cluster::configured(|config| config.api_keys = Some(path)).await;
    let (ar, dit) = (Script::new([]), Script::new([]));
    let stages = [
        fake::join(&cluster, Role::ArStage, "ar", &ar).await,
        fake::join(&cluster, Role::DitWorker, "dit", &dit).await,
    ];
    cluster.members(2).await;
    Doors {
        cluster,
        keys: [a, b],
        ar,
        _dir: dir,
        _stages: stages,
    }
}

fn keyed<T>(message: T, key: &str) -> Request<T> {
    let mut request = Request::new(message);
    let value = format!("Bearer {key}").parse().unwrap();
    request.metadata_mut().insert("authorization", value);
    request
}

impl Doors {
    async fn generate(&self, ask: GenerateRequest, key: &str) -> Result<(), base::Failure> {
        let mut client = self.cluster.client.clone();
        let stream = bounded(client.generate(keyed(ask, key))).await;
        let stream = stream.map_err(|status| failure(&status))?.into_inner();
        match collect(stream).await.1 {
            None => Ok(()),
            Some(status) => Err(failure(&status)),
        }
    }

    async fn http(&self, key: Option<&str>) -> (StatusCode, serde_json::Value) {
        let mut ask = post(IMAGES, wish().to_string());
        if let Some(key) = key {
            let value = format!("Bearer {key}").parse().unwrap();
            ask.headers_mut().insert(AUTHORIZATION, value);
        }
        let response = send(self.cluster.http, ask).await;
        (response.status(), answer(response).await)
    }
}

#[tokio::test]
async fn without_a_key_that_is_known_nobody_gets_an_image_through_either_door() {
    let doors = doors().await;
    let (_, none) = doors.cluster.run(request("r")).await;
    let none = failure(&none.unwrap());
    assert_eq!(none.code, Code::Unauthenticated);
    assert!(none.message.contains("an API key is needed"), "{none}");
    let wrong = doors
        .generate(request("r"), "omni-wrong")
        .await
        .unwrap_err();
    assert_eq!(wrong.code, Code::Unauthenticated);
    assert!(
        !wrong.message.contains("omni-wrong"),
        "a key is not repeated: {wrong}"
    );
    for key in [None, Some("omni-wrong")] {
        let (status, body) = doors.http(key).await;
        assert_eq!(status, StatusCode::UNAUTHORIZED);
        assert_eq!(body["error"]["type"], "authentication_error");
    }
    let mut models = post("/v1/models", "");
    *models.method_mut() = axum::http::Method::GET;
    let response = send(doors.cluster.http, models).await;
    assert_eq!(response.status(), StatusCode::UNAUTHORIZED);
    // What anybody may know.
    let mut document = post("/openapi.json", "");
    *document.method_mut() = axum::http::Method::GET;
    assert_eq!(
        send(doors.cluster.http, document).await.status(),
        StatusCode::OK
    );
    // Nothing of it reached a stage.
    assert_eq!(doors.ar.calls(), 0);

    let asked = || doors.ar.seen.lock().unwrap().clone().unwrap().tenant;
    doors.generate(request("r"), &doors.keys[0]).await.unwrap();
    assert_eq!(asked(), "a");
    assert_eq!(doors.http(Some(&doors.keys[1])).await.0, StatusCode::OK);
    assert_eq!(asked(), "b");
}

#[tokio::test]
async fn a_key_asks_for_no_class_above_its_own() {
    let doors = doors().await;
    let urgent = GenerateRequest {
        priority: Priority::Interactive.into(),
        ..request("r")
    };
    let denied = doors
        .generate(urgent.clone(), &doors.keys[0])
        .await
        .unwrap_err();
    let (code, field) = (denied.code, denied.field.as_deref());
    assert_eq!((code, field), (Code::PermissionDenied, Some("priority")));
    doors.generate(urgent, &doors.keys[1]).await.unwrap();
}

#[tokio::test]
async fn a_request_of_another_tenant_is_not_known() {
    let doors = doors().await;
    doors
        .generate(request("mine"), &doors.keys[0])
        .await
        .unwrap();
    let mut client = doors.cluster.client.clone();
    let (get, cancel) = (
        GetRequest {
            request_id: "mine".to_owned(),
        },
        CancelRequest {
            request_id: "mine".to_owned(),
        },
    );
    bounded(client.get(keyed(get.clone(), &doors.keys[0])))
        .await
        .unwrap();
    bounded(client.cancel(keyed(cancel.clone(), &doors.keys[0])))
        .await
        .unwrap();
    let other = bounded(client.get(keyed(get.clone(), &doors.keys[1]))).await;
    assert_eq!(failure(&other.unwrap_err()).code, Code::NotFound);
    let other = bounded(client.cancel(keyed(cancel, &doors.keys[1]))).await;
    assert_eq!(failure(&other.unwrap_err()).code, Code::NotFound);
    let nobody = bounded(client.get(get)).await;
    assert_eq!(failure(&nobody.unwrap_err()).code, Code::Unauthenticated);
}
