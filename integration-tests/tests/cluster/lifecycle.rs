//! Processes start, answer, stop and die in the open: no hang, no leftover, one typed error.
use std::collections::BTreeSet;

use base::Code;
use proto::v1::{CancelRequest, DrainRequest, GenerateRequest, Role, admin_service_client};
use tonic_health::pb::{
    HealthCheckRequest, health_check_response::ServingStatus, health_client::HealthClient,
};
use tonic_reflection::pb::{v1, v1alpha};

use crate::harness::{Up, bounded, first_step, generate, is_alive, refused, request};

/// A request that outlasts everything a test does to it.
fn long(prompt: &str) -> GenerateRequest {
    GenerateRequest {
        steps: Some(200),
        ..request(prompt)
    }
}

#[tokio::test]
async fn every_server_answers_health_and_both_reflections() {
    let up = Up::shared();
    let members = up.members().await;
    let roles: BTreeSet<i32> = members.iter().map(|member| member.role).collect();
    let expected = [
        Role::Router,
        Role::ArStage,
        Role::KvTransfer,
        Role::DitWorker,
    ];
    assert_eq!(roles, expected.into_iter().map(i32::from).collect());
    for member in members {
        let service = match member.role() {
            Role::Router => proto::names::IMAGE,
            Role::ArStage => proto::names::AR_STAGE,
            Role::KvTransfer => proto::names::KV_TRANSFER,
            _ => proto::names::DIT_WORKER,
        };
        let channel = proto::channel::lazy(&member.endpoint).unwrap();
        for name in [service, ""] {
            let ask = HealthCheckRequest {
                service: name.to_owned(),
            };
            let mut health = HealthClient::new(channel.clone());
            let answer = bounded(health.check(ask)).await.unwrap().into_inner();
            assert_eq!(
                answer.status(),
                ServingStatus::Serving,
                "{name:?} of {service}"
            );
        }
        assert!(
            listed_v1(channel.clone()).await.contains(service),
            "{service}"
        );
        assert!(listed_v1alpha(channel).await.contains(service), "{service}");
    }
}

async fn listed_v1(channel: tonic::transport::Channel) -> BTreeSet<String> {
    use v1::{
        server_reflection_request::MessageRequest, server_reflection_response::MessageResponse,
    };
    let ask = v1::ServerReflectionRequest {
        host: String::new(),
        message_request: Some(MessageRequest::ListServices(String::new())),
    };
    let mut client = v1::server_reflection_client::ServerReflectionClient::new(channel);
    let call = client.server_reflection_info(tokio_stream::once(ask));
    let mut answers = bounded(call).await.unwrap().into_inner();
    let answer = bounded(answers.message()).await.unwrap().unwrap();
    match answer.message_response {
        Some(MessageResponse::ListServicesResponse(list)) => list
            .service
            .into_iter()
            .map(|service| service.name)
            .collect(),
        other => panic!("unexpected {other:?}"),
    }
}

async fn listed_v1alpha(channel: tonic::transport::Channel) -> BTreeSet<String> {
    use v1alpha::{
        server_reflection_request::MessageRequest, server_reflection_response::MessageResponse,
    };
    let ask = v1alpha::ServerReflectionRequest {
        host: String::new(),
        message_request: Some(MessageRequest::ListServices(String::new())),
    };
    let mut client = v1alpha::server_reflection_client::ServerReflectionClient::new(channel);
    let call = client.server_reflection_info(tokio_stream::once(ask));
    let mut answers = bounded(call).await.unwrap().into_inner();
    let answer = bounded(answers.message()).await.unwrap().unwrap();
    match answer.message_response {
        Some(MessageResponse::ListServicesResponse(list)) => list
            .service
            .into_iter()
            .map(|service| service.name)
            .collect(),
        other => panic!("unexpected {other:?}"),
    }
}

/// The worker holds nothing any more.
async fn idle(up: &Up) {
    let drained = async {
        loop {
            let members = up.members().await;
            let worker = members
                .iter()
                .find(|member| member.role() == Role::DitWorker)
                .unwrap();
            let load = worker.load.unwrap_or_default();
            if load.running + load.queued == 0 {
                return;
            }
            tokio::time::sleep(std::time::Duration::from_millis(50)).await;
        }
    };
    bounded(drained).await;
}

#[tokio::test]
async fn a_cancelled_and_an_abandoned_request_end_and_free_the_worker() {
    let up = Up::start("shm");
    let mut client = up.client();
    let mut stream = bounded(client.generate(long("cancelled")))
        .await
        .unwrap()
        .into_inner();
    let request_id = first_step(&mut stream).await;
    let cancel = CancelRequest { request_id };
    assert!(
        bounded(client.cancel(cancel))
            .await
            .unwrap()
            .into_inner()
            .cancelled
    );
    let ended = loop {
        match bounded(stream.message()).await {
            Ok(Some(_)) => {}
            Ok(None) => panic!("a cancelled request ended well"),
            Err(status) => break proto::status::failure(&status),
        }
    };
    assert_eq!(ended.code, Code::Cancelled, "{ended}");
    idle(&up).await;

    let mut stream = bounded(client.generate(long("abandoned")))
        .await
        .unwrap()
        .into_inner();
    first_step(&mut stream).await;
    drop(stream);
    idle(&up).await;
}

#[tokio::test]
async fn a_killed_worker_is_a_typed_error_and_the_end_of_up() {
    let mut up = Up::start("shm");
    let mut stream = bounded(up.client().generate(long("killed")))
        .await
        .unwrap()
        .into_inner();
    first_step(&mut stream).await;
    up.kill("dit-worker");
    let ended = loop {
        match bounded(stream.message()).await {
            Ok(Some(_)) => {}
            Ok(None) => panic!("a request without a worker ended well"),
            Err(status) => break proto::status::failure(&status),
        }
    };
    assert_eq!(ended.code, Code::Unavailable, "{ended}");
    let status = up.wait();
    assert_eq!(status.code(), Some(1), "{}", up.log());
    assert!(
        up.log().contains("dit-worker ended unexpectedly"),
        "{}",
        up.log()
    );
}

#[tokio::test]
async fn a_drained_worker_finishes_its_request_and_leaves_without_ending_up() {
    let mut up = Up::start("shm");
    let mut admin = admin_service_client::AdminServiceClient::new(up.channel());
    let worker = up.members().await;
    let worker = worker.iter().find(|m| m.role() == Role::DitWorker).unwrap();
    let member_id = worker.id.clone();
    let request = GenerateRequest {
        steps: Some(60),
        ..request("drained")
    };
    let drain = async {
        accepted(&up).await;
        admin.drain(DrainRequest { member_id }).await.unwrap();
    };
    let both = Box::pin(async { tokio::join!(generate(&up, request), drain) });
    let (answer, _) = bounded(both).await;
    answer.unwrap();
    let left = async {
        while up.children().iter().any(|(role, _)| role == "dit-worker") {
            tokio::time::sleep(std::time::Duration::from_millis(50)).await;
        }
    };
    bounded(left).await;
    let refused = refused(&up, long("nobody draws")).await;
    assert_eq!(refused.code, Code::Unavailable, "{refused}");
    up.terminate();
    let status = up.wait();
    assert!(status.success(), "{status}:\n{}", up.log());
}

#[tokio::test]
async fn a_clean_stop_finishes_the_request_and_leaves_no_process() {
    let mut up = Up::start("shm");
    let children = up.children();
    assert_eq!(children.len(), 4, "{children:?}");
    let request = GenerateRequest {
        steps: Some(60),
        ..request("finishes")
    };
    let stop = async {
        accepted(&up).await;
        up.terminate();
    };
    let both = Box::pin(async { tokio::join!(generate(&up, request), stop) });
    let (answer, ()) = bounded(both).await;
    answer.unwrap();
    let status = up.wait();
    assert!(status.success(), "{status}:\n{}", up.log());
    for (role, pid) in children {
        assert!(!is_alive(pid), "{role} is still there");
    }
}

/// The worker has something to do.
async fn accepted(up: &Up) {
    loop {
        let members = up.members().await;
        let busy = members.iter().any(|member| {
            let load = member.load.unwrap_or_default();
            member.role() == Role::DitWorker && load.running + load.queued > 0
        });
        if busy {
            return;
        }
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
}

#[tokio::test]
async fn when_up_is_killed_its_roles_end_by_themselves() {
    let up = Up::start("shm");
    let children = up.children();
    drop(up);
    let gone = async {
        while children.iter().any(|(_, pid)| is_alive(*pid)) {
            tokio::time::sleep(std::time::Duration::from_millis(50)).await;
        }
    };
    bounded(gone).await;
}
