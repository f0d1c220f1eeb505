//! The same request sent twice, and stages that fall silent.
use proto::v1::generate_response::Event;
use registry::Role;

use super::{
    Cluster, accepted, bounded, collect,
    fake::{self, Act, Script},
    next, request,
};

/// One stage of each kind.
async fn stages(cluster: &Cluster, ar: &Script, dit: &Script) -> [fake::Stage; 2] {
    let stages = [
        fake::join(cluster, Role::ArStage, "ar", ar).await,
        fake::join(cluster, Role::DitWorker, "dit", dit).await,
    ];
    cluster.members(2).await;
    stages
}

fn images(events: &[Event]) -> Vec<Vec<u8>> {
    let png = |event: &Event| match event {
        Event::Image(image) => Some(image.png.clone()),
        _ => None,
    };
    events.iter().filter_map(png).collect()
}

#[tokio::test]
async fn the_same_request_sent_again_joins_the_running_one() {
    let cluster = Cluster::start().await;
    let (ar, dit) = (Script::new([]), Script::paced(1));
    let _stages = stages(&cluster, &ar, &dit).await;
    let mut first = cluster.open(request("one")).await.unwrap();
    while !matches!(next(&mut first).await.unwrap(), Event::Step(_)) {}
    let second = cluster.open(request("one")).await.unwrap();
    // The first client goes away; the request goes on for the second.
    drop(first);
    dit.steps.add_permits(9);
    let (events, error) = collect(second).await;
    assert!(error.is_none(), "{error:?}");
    assert_eq!(accepted(&events).request_id, "one");
    assert_eq!(images(&events).len(), 1);
    assert_eq!((ar.calls(), dit.calls()), (1, 1));
}

#[tokio::test]
async fn both_clients_of_one_request_get_the_same_answer() {
    let cluster = Cluster::start().await;
    let (ar, dit) = (Script::new([]), Script::paced(0));
    let _stages = stages(&cluster, &ar, &dit).await;
    let first = cluster.open(request("one")).await.unwrap();
    let second = cluster.open(request("one")).await.unwrap();
    dit.steps.add_permits(9);
    let ((one, failed), (two, failed_too)) = tokio::join!(collect(first), collect(second));
    assert!(failed.is_none() && failed_too.is_none());
    assert_eq!((images(&one).len(), images(&one)), (1, images(&two)));
    assert_eq!(one.last(), two.last());
    assert_eq!((ar.calls(), dit.calls()), (1, 1));
}

#[tokio::test]
async fn a_named_request_without_a_seed_has_the_same_one_at_every_router() {
    let mut seeds = Vec::new();
    for _ in 0..2 {
        let cluster = Cluster::start().await;
        let _stages = stages(&cluster, &Script::new([]), &Script::new([])).await;
        for id in ["one", "other", ""] {
            let mut wish = request(id);
            wish.seed = None;
            let (events, error) = cluster.run(wish).await;
            assert!(error.is_none(), "{error:?}");
            seeds.push(accepted(&events).seed);
        }
    }
    assert_eq!(seeds[..2], seeds[3..5]);
    assert_ne!(seeds[0], seeds[1]);
    assert_ne!(seeds[2], seeds[5]);
}

/// A request hangs at a stage of `role`, whose connection stays while its lease runs out.
async fn given_up(role: Role) {
    let cluster = Cluster::start().await;
    let (hung, well) = (Script::new([Act::Hang]), Script::new([]));
    let (ar, dit) = if role == Role::ArStage {
        (&hung, &well)
    } else {
        (&well, &hung)
    };
    let stages = stages(&cluster, ar, dit).await;
    let stream = cluster.open(request("one")).await.unwrap();
    hung.called().await;
    let _third = fake::join(&cluster, role, "z", &Script::new([])).await;
    cluster.members(3).await;
    stages[usize::from(role == Role::DitWorker)].lapse();
    let (events, error) = bounded(collect(stream)).await;
    assert!(error.is_none(), "{role:?} {error:?}");
    assert!(matches!(events.last(), Some(Event::Done(_))));
}

#[tokio::test]
async fn a_stage_that_is_silent_and_whose_lease_has_run_out_is_given_up() {
    tokio::join!(given_up(Role::ArStage), given_up(Role::DitWorker));
}
