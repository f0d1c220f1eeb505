//! etcd dies, workers stall, routers are killed: images are drawn as long as somebody can draw them.
use std::time::Duration;

use base::{Code, limits::LEASE_TTL};
use proto::v1::{
    GenerateRequest, Member, PrefillRequest, Role, ar_stage_service_client::ArStageServiceClient,
};
use rustix::process::Signal;

use crate::{
    fleet::{Fleet, ready},
    harness::{bounded, request},
};

/// A stall must be found within this.
const FOUND: Duration = Duration::from_secs(10);

#[tokio::test]
async fn etcd_is_killed_images_are_drawn_it_returns_and_a_drain_works_at_the_second_router() {
    let mut fleet = Fleet::start().await;
    let first = fleet.routers[0].draw(request("a red boat")).await.unwrap();
    let again = fleet.routers[1].draw(request("a red boat")).await.unwrap();
    assert_eq!(first, again, "one cluster, whichever router is asked");
    assert!((fleet.routers[0].metric("omni_registry_followed") - 1.0).abs() < 0.1);

    // etcd is not on the way of a request: one that runs does not notice.
    let (running, under_way) = fleet.routers[0].begin(GenerateRequest {
        steps: Some(12),
        ..request("a red boat")
    });
    under_way.await.unwrap();
    fleet.etcd.kill();
    assert!(!running.await.unwrap().unwrap().is_empty());
    // Longer than every lease: nobody is dropped because etcd cannot be asked.
    tokio::time::sleep(LEASE_TTL * 2).await;
    for router in &fleet.routers {
        assert!(router.metric("omni_registry_followed") < 0.1);
        assert!(router.metric("omni_registry_staleness") > LEASE_TTL.as_secs_f64());
        let image = router.draw(request("a red boat")).await.unwrap();
        assert_eq!(image, first, "drawn from the last picture");
    }

    fleet.etcd.restart();
    let [one, two] = &fleet.routers;
    let worker = |members: &[Member]| ready(members, Role::DitWorker).len() == 1;
    let members = two.sees("the worker after the return", worker).await;
    let worker = ready(&members, Role::DitWorker)[0].id.clone();
    while two.metric("omni_registry_followed") < 0.5 {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    // The picture is the registry's again: what one router is asked for, the other one sees.
    two.drain(&worker).await;
    let gone = |members: &[Member]| members.iter().all(|member| member.id != worker);
    one.sees("the drained worker gone", gone).await;
    assert!(fleet.dit.ended().success(), "{}", fleet.dit.log());
    let refused = fleet.routers[0].draw(request("a red boat")).await;
    let code = proto::status::code(&refused.unwrap_err());
    assert_eq!(code, Code::Unavailable);

    // A new worker joins; a router is killed; the other one goes on.
    let _worker = fleet.worker();
    let back = |members: &[Member]| ready(members, Role::DitWorker).len() == 1;
    fleet.routers[0].sees("a new worker", back).await;
    fleet.routers[1].signal(Signal::KILL);
    let image = fleet.routers[0].draw(request("a red boat")).await.unwrap();
    assert_eq!(image, first);
    let alone = |members: &[Member]| ready(members, Role::Router).len() == 1;
    fleet.routers[0].sees("the killed router gone", alone).await;
}

#[tokio::test]
async fn a_stage_that_stalls_is_dropped_and_returns_fenced_against_every_earlier_epoch() {
    let fleet = Fleet::start().await;
    let router = &fleet.routers[0];
    let first = router.draw(request("a green tree")).await.unwrap();
    let (members, before) = router.members().await;
    let stage = ready(&members, Role::ArStage)[0].clone();

    fleet.ar.signal(Signal::STOP);
    let gone = router.sees("the stalled stage gone", |members| {
        members.iter().all(|member| member.id != stage.id)
    });
    let found = tokio::time::timeout(FOUND, gone).await;
    assert!(found.is_ok(), "a stall was not found in {FOUND:?}");
    let refused = router.draw(request("a green tree")).await.unwrap_err();
    assert_eq!(proto::status::code(&refused), Code::Unavailable);

    fleet.ar.signal(Signal::CONT);
    let back = |members: &[Member]| {
        let stages = ready(members, Role::ArStage);
        stages.iter().any(|member| member.epoch > before)
    };
    let members = router.sees("the stage under a newer epoch", back).await;
    let again = ready(&members, Role::ArStage)[0];
    assert_eq!(again.id, stage.id);

    // Whoever still decides on the picture of before is refused, by the stage itself.
    let channel = proto::channel::lazy(&stage.endpoint).unwrap();
    let late = PrefillRequest {
        request_id: "late".to_owned(),
        epoch: before,
        weights_id: stage.model.unwrap().weights_id,
        prompt: "a green tree".to_owned(),
        template: "pretrain".to_owned(),
        height: 256,
        width: 256,
        ..PrefillRequest::default()
    };
    let mut client = ArStageServiceClient::new(channel);
    let status = bounded(client.prefill(late)).await.unwrap_err();
    assert_eq!(proto::status::code(&status), Code::Aborted, "{status}");
    let image = router.draw(request("a green tree")).await.unwrap();
    assert_eq!(image, first);
}
