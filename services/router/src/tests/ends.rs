//! Requests that end otherwise: cancelled, abandoned, out of time, out of luck.
use std::time::Duration;

use base::Code;
use proto::{
    names,
    status::failure,
    v1::{
        CancelRequest, DrainRequest, GetVersionRequest, ListMembersRequest,
        admin_service_client::AdminServiceClient, generate_response::Event, get_response::State,
    },
};
use registry::{MemberState, Role, Snapshots};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
};
use tonic::Request;
use tonic_health::pb::{HealthCheckRequest, health_client::HealthClient};

use super::{
    Cluster, SOON, bounded, collect,
    fake::{self, Act, Script, away},
    next, request,
};
use crate::admission::Limits;

async fn stages(cluster: &Cluster, ar: &Script, dit: &Script) -> [fake::Stage; 2] {
    [
        fake::join(cluster, Role::ArStage, "ar", ar).await,
        fake::join(cluster, Role::DitWorker, "dit", dit).await,
    ]
}

/// Reads until `step` is done.
async fn until_step(stream: &mut tonic::Streaming<proto::v1::GenerateResponse>, step: u32) {
    loop {
        if let Event::Step(done) = next(stream).await.unwrap()
            && done.step == step
        {
            return;
        }
    }
}

#[tokio::test]
async fn cancel_ends_a_request_between_steps_and_its_stage_hears_of_it() {
    let cluster = Cluster::start().await;
    let (ar, dit) = (Script::new([]), Script::paced(2));
    let _stages = stages(&cluster, &ar, &dit).await;
    let mut stream = cluster.open(request("one")).await.unwrap();
    until_step(&mut stream, 2).await;
    assert_eq!(cluster.state("one").await, State::Denoise);
    let ask = CancelRequest {
        request_id: "one".into(),
    };
    assert!(
        cluster
            .client
            .clone()
            .cancel(ask.clone())
            .await
            .unwrap()
            .into_inner()
            .cancelled
    );
    let (events, error) = collect(stream).await;
    assert!(events.is_empty(), "{events:?}");
    assert_eq!(failure(&error.unwrap()).code, Code::Cancelled);
    dit.dropped().await;
    assert_eq!(cluster.state("one").await, State::Cancelled);
    assert!(
        !cluster
            .client
            .clone()
            .cancel(ask)
            .await
            .unwrap()
            .into_inner()
            .cancelled
    );
}

#[tokio::test]
async fn a_client_that_goes_away_stops_the_denoiser() {
    let cluster = Cluster::start().await;
    let (ar, dit) = (Script::new([]), Script::paced(1));
    let _stages = stages(&cluster, &ar, &dit).await;
    let mut stream = cluster.open(request("one")).await.unwrap();
    until_step(&mut stream, 1).await;
    drop(stream);
    dit.dropped().await;
    // The id is free again once the walk has ended.
    dit.steps.add_permits(10);
    let again = async {
        loop {
            let (_, error) = cluster.run(request("one")).await;
            match error.map(|status| failure(&status).code) {
                None => return,
                Some(code) => assert_eq!(code, Code::AlreadyExists),
            }
        }
    };
    bounded(again).await;
}

#[tokio::test]
async fn a_client_that_goes_away_stops_the_prefill() {
    let cluster = Cluster::start().await;
    let (ar, dit) = (Script::new([Act::Hang]), Script::new([]));
    let _stages = stages(&cluster, &ar, &dit).await;
    let stream = cluster.open(request("one")).await.unwrap();
    ar.called().await;
    drop(stream);
    ar.dropped().await;
    assert_eq!(dit.calls(), 0);
}

#[tokio::test]
async fn a_deadline_ends_a_request_typed() {
    let cluster = Cluster::start().await;
    let (ar, dit) = (Script::new([]), Script::paced(1));
    let _stages = stages(&cluster, &ar, &dit).await;
    cluster.members(2).await;
    let mut timed = Request::new(request("one"));
    timed.set_timeout(Duration::from_millis(700));
    let stream = bounded(cluster.client.clone().generate(timed))
        .await
        .unwrap()
        .into_inner();
    let (_, error) = collect(stream).await;
    assert_eq!(failure(&error.unwrap()).code, Code::DeadlineExceeded);
    dit.dropped().await;
    // What is left of it is what the worker orders its steps by.
    let given = dit.given.lock().unwrap().unwrap();
    assert!(given < Duration::from_millis(700), "{given:?}");
}

#[tokio::test]
async fn a_running_id_is_taken_for_any_other_request() {
    let cluster = Cluster::start().await;
    let (ar, dit) = (Script::new([]), Script::paced(0));
    let _stages = stages(&cluster, &ar, &dit).await;
    let first = cluster.open(request("one")).await.unwrap();
    let mut other = request("one");
    other.prompt = "a blue fox".into();
    let error = failure(&cluster.run(other).await.1.unwrap());
    assert_eq!(
        (error.code, error.field.as_deref()),
        (Code::AlreadyExists, Some("request_id"))
    );
    dit.steps.add_permits(3);
    assert!(collect(first).await.1.is_none());
}

#[tokio::test]
async fn a_denoiser_killed_in_the_middle_is_unavailable_not_a_hang() {
    let cluster = Cluster::start().await;
    let (ar, dit) = (Script::new([]), Script::paced(1));
    let [_ar, mut worker] = stages(&cluster, &ar, &dit).await;
    let mut stream = cluster.open(request("one")).await.unwrap();
    until_step(&mut stream, 1).await;
    worker.kill();
    let error = failure(&collect(stream).await.1.unwrap());
    assert_eq!(error.code, Code::Unavailable);
    assert!(
        error.message.starts_with("dit-worker dit went away"),
        "{error}"
    );
    assert_eq!(cluster.state("one").await, State::Failed);
}

#[tokio::test]
async fn a_denoiser_killed_before_its_first_step_is_replaced_if_there_is_another() {
    let cluster = Cluster::start().await;
    let (ar, a, b) = (Script::new([]), Script::paced(0), Script::paced(0));
    let _ar = fake::join(&cluster, Role::ArStage, "ar", &ar).await;
    let mut first = fake::join(&cluster, Role::DitWorker, "a", &a).await;
    let mut second = fake::join(&cluster, Role::DitWorker, "b", &b).await;
    cluster.members(3).await;
    let mut stream = cluster.open(request("one")).await.unwrap();
    while !matches!(next(&mut stream).await.unwrap(), Event::Queued(_)) {}
    let (killed, other) = if a.calls() == 1 {
        (&mut first, &b)
    } else {
        (&mut second, &a)
    };
    killed.kill();
    other.called().await;
    other.steps.add_permits(3);
    let (events, error) = collect(stream).await;
    assert!(error.is_none(), "{error:?}");
    assert!(matches!(events.last(), Some(Event::Done(_))));
}

#[tokio::test]
async fn without_another_member_the_outage_is_the_answer() {
    let cluster = Cluster::start().await;
    let (ar, dit) = (Script::new([away(), Act::Silence]), Script::new([away()]));
    let _stages = stages(&cluster, &ar, &dit).await;
    let error = failure(&cluster.run(request("one")).await.1.unwrap());
    assert_eq!(error.code, Code::Unavailable);
    assert!(
        error.message.contains("ar-stage ar went away: leaving"),
        "{error}"
    );
    let error = failure(&cluster.run(request("two")).await.1.unwrap());
    assert_eq!(
        error.code,
        Code::Internal,
        "a stage that says nothing breaks the protocol"
    );
    let error = failure(&cluster.run(request("three")).await.1.unwrap());
    assert!(
        error.message.contains("dit-worker dit went away"),
        "{error}"
    );
    assert!(cluster.run(request("four")).await.1.is_none());
}

#[tokio::test]
async fn a_full_router_refuses_with_a_hint_and_serves_in_order() {
    let limits = Limits {
        max_running: 1,
        max_queued: 1,
        max_cost: u64::MAX,
        ..Limits::default()
    };
    let cluster = Cluster::with(limits).await;
    let (ar, dit) = (Script::new([]), Script::paced(0));
    let _stages = stages(&cluster, &ar, &dit).await;
    let first = cluster.open(request("one")).await.unwrap();
    dit.called().await;
    let mut second = cluster.open(request("two")).await.unwrap();
    assert!(matches!(
        next(&mut second).await.unwrap(),
        Event::Accepted(_)
    ));
    let Event::Queued(queued) = next(&mut second).await.unwrap() else {
        panic!()
    };
    assert_eq!((queued.ahead, queued.stage.as_str()), (0, "router"));
    assert_eq!(cluster.state("two").await, State::Queued);
    let error = failure(&cluster.run(request("three")).await.1.unwrap());
    assert_eq!(error.code, Code::ResourceExhausted);
    assert!(error.retry_after.is_some());
    dit.steps.add_permits(6);
    assert!(collect(first).await.1.is_none());
    assert!(collect(second).await.1.is_none());
    assert_eq!(dit.calls(), 2);
}

#[tokio::test]
async fn a_clean_stop_finishes_what_runs_and_refuses_what_comes() {
    let cluster = Cluster::start().await;
    let (ar, dit) = (Script::new([]), Script::paced(1));
    let _stages = stages(&cluster, &ar, &dit).await;
    let mut stream = cluster.open(request("one")).await.unwrap();
    until_step(&mut stream, 1).await;
    cluster.shutdown.signal();
    let refused = async {
        loop {
            let error = failure(&cluster.run(request("late")).await.1.unwrap());
            assert_eq!(error.code, Code::Unavailable);
            if error.message == "this router is shutting down" {
                return;
            }
        }
    };
    bounded(refused).await;
    dit.steps.add_permits(10);
    let (events, error) = collect(stream).await;
    assert!(error.is_none(), "{error:?}");
    assert!(matches!(events.last(), Some(Event::Done(_))));
    bounded(cluster.server).await.unwrap().unwrap();
}

#[tokio::test]
async fn a_second_signal_ends_what_runs() {
    let cluster = Cluster::start().await;
    let (ar, dit) = (Script::new([]), Script::paced(1));
    let _stages = stages(&cluster, &ar, &dit).await;
    let mut stream = cluster.open(request("one")).await.unwrap();
    until_step(&mut stream, 1).await;
    cluster.shutdown.signal();
    cluster.shutdown.signal();
    let error = failure(&collect(stream).await.1.unwrap());
    assert_eq!(
        (error.code, error.message.as_str()),
        (Code::Unavailable, "this router is shutting down")
    );
    bounded(cluster.server).await.unwrap().unwrap();
}

#[tokio::test]
async fn health_says_whether_an_image_can_be_made() {
    let cluster = Cluster::start().await;
    let mut health = HealthClient::new(cluster.channel.clone());
    let mut status = async |service: &str| {
        let ask = HealthCheckRequest {
            service: service.into(),
        };
        bounded(health.check(ask))
            .await
            .unwrap()
            .into_inner()
            .status
    };
    const SERVING: i32 = 1;
    const NOT_SERVING: i32 = 2;
    assert_eq!(status(names::REGISTRY).await, SERVING);
    assert_eq!(status(names::IMAGE).await, NOT_SERVING);
    let (ar, dit) = (Script::new([]), Script::new([]));
    let _stages = stages(&cluster, &ar, &dit).await;
    cluster.members(2).await;
    bounded(async {
        while status("").await != SERVING || status(names::IMAGE).await != SERVING {}
    })
    .await;
}

#[tokio::test]
async fn operators_see_members_and_drain_them() {
    let cluster = Cluster::start().await;
    let (ar, dit) = (Script::new([]), Script::new([]));
    let _stages = stages(&cluster, &ar, &dit).await;
    cluster.members(2).await;
    let mut admin = AdminServiceClient::new(cluster.channel.clone());
    let version = admin
        .get_version(GetVersionRequest {})
        .await
        .unwrap()
        .into_inner();
    assert_eq!(version.version, env!("CARGO_PKG_VERSION"));
    let list = admin
        .list_members(ListMembersRequest {})
        .await
        .unwrap()
        .into_inner();
    let mut roles: Vec<_> = list.members.iter().map(|member| member.role()).collect();
    roles.sort_by_key(|&role| role as i32);
    assert_eq!(roles, [Role::Router, Role::ArStage, Role::DitWorker]);
    let drained = DrainRequest {
        member_id: "dit".into(),
    };
    admin.drain(drained).await.unwrap();
    let snapshots = Snapshots::follow(cluster.registry.clone());
    let seen = snapshots.wait(SOON, |now| {
        now.members
            .get("dit")
            .is_some_and(|member| member.state() == MemberState::Draining)
    });
    assert!(seen.await.is_some());
    let refused = admin
        .drain(DrainRequest {
            member_id: "nobody".into(),
        })
        .await
        .unwrap_err();
    assert_eq!(failure(&refused).code, Code::NotFound);
    let error = failure(&cluster.run(request("one")).await.1.unwrap());
    assert_eq!(error.message, "no dit-worker is ready");
    assert_eq!(dit.calls(), 0);
}

async fn http_get(address: std::net::SocketAddr, path: &str) -> String {
    let mut stream = TcpStream::connect(address).await.unwrap();
    let ask = format!("GET {path} HTTP/1.1\r\nhost: test\r\nconnection: close\r\n\r\n");
    stream.write_all(ask.as_bytes()).await.unwrap();
    let mut answer = String::new();
    bounded(stream.read_to_string(&mut answer)).await.unwrap();
    answer
}

#[tokio::test]
async fn probes_and_metrics_tell_what_happened() {
    let cluster = Cluster::start().await;
    assert!(
        http_get(cluster.admin, "/livez")
            .await
            .starts_with("HTTP/1.1 200")
    );
    assert!(
        http_get(cluster.admin, "/readyz")
            .await
            .starts_with("HTTP/1.1 503")
    );
    assert!(cluster.run(request("early")).await.1.is_some());
    let (ar, dit) = (Script::new([]), Script::new([]));
    let _stages = stages(&cluster, &ar, &dit).await;
    assert!(cluster.run(request("one")).await.1.is_none());
    let mut bad = request("two");
    bad.steps = Some(0);
    assert!(cluster.run(bad).await.1.is_some());
    assert!(
        http_get(cluster.admin, "/readyz")
            .await
            .starts_with("HTTP/1.1 200")
    );
    let text = http_get(cluster.admin, "/metrics").await;
    for line in [
        "omni_router_requests_total{model=\"tiny\",code=\"OK\"} 1",
        "omni_router_requests_total{model=\"\",code=\"INVALID_ARGUMENT\"} 1",
        "omni_router_shed_total{reason=\"no_stage\"} 1",
        "omni_router_request_duration_seconds_count{model=\"tiny\"} 1",
        "omni_registry_members{role=\"dit-worker\",state=\"ready\"} 1",
        "omni_router_running 0",
    ] {
        assert!(text.contains(line), "no {line} in\n{text}");
    }
}
