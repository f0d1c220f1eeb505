//! Roles, strangers and certificates that change, against a real server.
use std::{sync::Arc, time::Duration};

use base::{Code, Failure, task::Owned};
use tonic::transport::Channel;

use super::{Callers, Tls, pki::Pki};
use crate::{
    access::Role,
    channel::lazy_as,
    names, server,
    v1::{
        PrefillRequest, PrefillResponse,
        ar_stage_service_client::ArStageServiceClient,
        ar_stage_service_server::{ArStageService, ArStageServiceServer},
    },
};

const SOON: Duration = Duration::from_secs(20);

struct Stage;

#[tonic::async_trait]
impl ArStageService for Stage {
    type PrefillStream = tokio_stream::Empty<Result<PrefillResponse, tonic::Status>>;

    async fn prefill(
        &self,
        _: tonic::Request<PrefillRequest>,
    ) -> Result<tonic::Response<Self::PrefillStream>, tonic::Status> {
        Ok(tonic::Response::new(tokio_stream::empty()))
    }
}

struct Server {
    address: String,
    tls: Arc<Tls>,
    _task: Owned<Result<(), Failure>>,
}

async fn serve(pki: &Pki, callers: Callers) -> Server {
    let tls = Tls::load(pki.issue(Role::ArStage)).unwrap();
    let (mut routes, _health) = server::routes(&[names::AR_STAGE]).await.unwrap();
    routes.add_service(ArStageServiceServer::new(Stage));
    let listener = server::bind("127.0.0.1:0", "listen").await.unwrap();
    let address = format!("https://{}", listener.local_addr().unwrap());
    let identity = Some((tls.clone(), callers));
    let task = base::task::spawn(server::serve_as(
        identity,
        listener,
        routes,
        std::future::pending(),
    ));
    Server {
        address,
        tls,
        _task: task,
    }
}

impl Server {
    fn channel(&self, tls: Arc<Tls>) -> Channel {
        lazy_as(tls, &self.address, "endpoint").unwrap()
    }

    async fn call(&self, files: super::TlsFiles) -> Result<(), Failure> {
        ask(self.channel(Tls::load(files).unwrap())).await
    }
}

async fn ask(channel: Channel) -> Result<(), Failure> {
    let mut client = ArStageServiceClient::new(channel);
    let asked = tokio::time::timeout(SOON, client.prefill(PrefillRequest::default()));
    let answer = asked.await.expect("the call neither succeeds nor fails");
    answer
        .map(drop)
        .map_err(|status| crate::status::failure(&status))
}

#[tokio::test]
async fn the_right_role_passes_and_the_wrong_one_is_refused_by_name() {
    let pki = Pki::new();
    let server = serve(&pki, Callers::Certified).await;
    server.call(pki.issue(Role::Router)).await.unwrap();
    let refused = server.call(pki.issue(Role::DitWorker)).await.unwrap_err();
    assert_eq!(refused.code, Code::PermissionDenied);
    assert!(
        refused
            .message
            .contains("dit-worker may not call omni.v1.ArStageService"),
        "{refused}"
    );
}

#[tokio::test]
async fn who_has_no_certificate_an_old_one_or_one_of_another_authority_is_refused() {
    let (pki, other) = (Pki::new(), Pki::new());
    let server = serve(&pki, Callers::Certified).await;
    let stranger = super::TlsFiles {
        ca: pki.nobody().ca,
        ..other.issue(Role::Router)
    };
    for files in [pki.nobody(), pki.expired(Role::Router), stranger] {
        let refused = server.call(files.clone()).await.unwrap_err();
        assert_eq!(refused.code, Code::Unavailable, "{files:?}: {refused}");
    }
    // The server lives on.
    server.call(pki.issue(Role::Router)).await.unwrap();
}

#[tokio::test]
async fn an_open_door_lets_strangers_in_to_what_is_open_to_them() {
    let pki = Pki::new();
    let server = serve(&pki, Callers::Anyone).await;
    let refused = server.call(pki.nobody()).await.unwrap_err();
    assert_eq!(refused.code, Code::Unauthenticated);
    let channel = server.channel(Tls::load(pki.nobody()).unwrap());
    let mut health = tonic_health::pb::health_client::HealthClient::new(channel);
    let ask = tonic_health::pb::HealthCheckRequest::default();
    tokio::time::timeout(SOON, health.check(ask))
        .await
        .unwrap()
        .unwrap();
}

#[tokio::test]
async fn a_server_of_another_authority_or_another_name_is_not_talked_to() {
    let (pki, other) = (Pki::new(), Pki::new());
    let server = serve(&pki, Callers::Anyone).await;
    let refused = server.call(other.issue(Role::Router)).await.unwrap_err();
    assert_eq!(refused.code, Code::Unavailable);
    // The certificate says 127.0.0.1 and localhost.
    let tls = Tls::load(pki.issue(Role::Router)).unwrap();
    let name = tokio_rustls::rustls::pki_types::ServerName::try_from("router").unwrap();
    let stream = tokio::net::TcpStream::connect(server.address.trim_start_matches("https://"));
    let connector = tokio_rustls::TlsConnector::from(tls.client());
    let error = connector
        .connect(name, stream.await.unwrap())
        .await
        .unwrap_err();
    assert!(error.to_string().contains("router"), "{error}");
}

#[tokio::test]
async fn files_that_change_are_used_by_the_next_connection_and_no_call_fails_meanwhile() {
    let pki = Pki::new();
    let server = serve(&pki, Callers::Certified).await;
    let client = Tls::load(pki.issue(Role::Router)).unwrap();
    let kept = server.channel(client.clone());
    ask(kept.clone()).await.unwrap();
    for round in 0..4 {
        let calls = (0..16).map(|_| ask(kept.clone()));
        let mut running: Vec<_> = calls.map(base::task::spawn).collect();
        pki.issue(Role::ArStage);
        pki.issue(Role::Router);
        assert!(
            server.tls.reload().unwrap() && client.reload().unwrap(),
            "{round}"
        );
        assert!(!server.tls.reload().unwrap(), "nothing has changed since");
        running.extend((0..16).map(|_| base::task::spawn(ask(server.channel(client.clone())))));
        for call in running {
            call.await.unwrap().unwrap();
        }
    }
}

#[tokio::test]
async fn an_authority_that_is_withdrawn_is_not_trusted_any_more() {
    let (pki, next) = (Pki::new(), Pki::new());
    let server = serve(&pki, Callers::Certified).await;
    let old = pki.issue(Role::Router);
    server.call(old.clone()).await.unwrap();
    std::fs::copy(&next.nobody().ca, &pki.nobody().ca).unwrap();
    assert!(server.tls.reload().unwrap());
    // The client still trusts the server, which does not trust it any more.
    assert_eq!(server.call(old).await.unwrap_err().code, Code::Unavailable);
}

#[test]
fn files_that_do_not_fit_together_are_named_and_leave_what_was_in_use() {
    use base::Fault as _;

    let pki = Pki::new();
    let files = pki.issue(Role::ArStage);
    let (cert, key) = files.identity.clone().unwrap();
    let tls = Tls::load(files.clone()).unwrap();
    let old = std::fs::read(&key).unwrap();
    pki.issue(Role::ArStage);
    // Only the certificate has been replaced so far.
    std::fs::write(&key, &old).unwrap();
    assert_eq!(tls.reload().unwrap_err().field(), Some("tls_cert"));
    for (path, field) in [
        (&files.ca, "tls_ca"),
        (&cert, "tls_cert"),
        (&key, "tls_key"),
    ] {
        let was = std::fs::read(path).unwrap();
        std::fs::write(path, "no PEM").unwrap();
        let error = Tls::load(files.clone()).unwrap_err();
        assert_eq!(error.field(), Some(field), "{error}");
        std::fs::remove_file(path).unwrap();
        let error = Tls::load(files.clone()).unwrap_err();
        assert_eq!(error.field(), Some(field), "{error}");
        assert!(
            error.to_string().contains(&path.display().to_string()),
            "{error}"
        );
        std::fs::write(path, was).unwrap();
    }
    assert!(tls.server(Callers::Certified).is_some());
}
