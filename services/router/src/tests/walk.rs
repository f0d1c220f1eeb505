//! Requests that end in an image.
use std::collections::{HashMap, HashSet};

use base::{Code, Failure};
use proto::v1::{generate_response::Event, get_response::State};
use registry::Role;

use super::{
    Cluster, accepted,
    fake::{self, Act, Script, away},
    request,
};

fn names(events: &[Event]) -> Vec<&'static str> {
    let name = |event: &Event| match event {
        Event::Accepted(_) => "accepted",
        Event::Queued(_) => "queued",
        Event::Text(_) => "text",
        Event::Step(_) => "step",
        Event::Image(_) => "image",
        Event::Done(_) => "done",
        Event::Preview(_) => "preview",
        Event::Written(_) => "written",
    };
    events.iter().map(name).collect()
}

#[tokio::test]
async fn a_prompt_walks_through_both_stages_to_an_image() {
    let cluster = Cluster::start().await;
    let (ar, dit) = (Script::new([]), Script::new([]));
    let _ar = fake::join(&cluster, Role::ArStage, "ar", &ar).await;
    let _dit = fake::join(&cluster, Role::DitWorker, "dit", &dit).await;
    let (events, error) = cluster.run(request("one")).await;
    assert!(error.is_none(), "{error:?}");
    assert_eq!(
        names(&events),
        [
            "accepted", "queued", "step", "step", "step", "image", "done"
        ]
    );
    let first = accepted(&events);
    assert_eq!(
        (first.request_id.as_str(), first.model.as_str()),
        ("one", "tiny")
    );
    assert_eq!(
        (first.width, first.height, first.seed, first.steps),
        (64, 64, 7, 3)
    );
    assert_eq!(first.cost, 3 * 2 * 16);
    let steps: Vec<_> = events
        .iter()
        .filter_map(|event| match event {
            Event::Step(step) => Some((step.step, step.steps)),
            _ => None,
        })
        .collect();
    assert_eq!(steps, [(1, 3), (2, 3), (3, 3)]);
    let Event::Image(image) = &events[5] else {
        panic!()
    };
    assert_eq!((image.width, image.height, image.index), (64, 64, 0));
    assert_eq!(image.png, 7_u64.to_le_bytes());
    let Event::Done(done) = &events[6] else {
        panic!()
    };
    let timings = done.timings.as_ref().unwrap();
    assert_eq!((timings.prefill_ms, timings.transfer_ms), (1.0, 2.0 + 3.0));
    assert_eq!((timings.denoise_ms, timings.decode_ms), (5.0, 6.0));
    assert_eq!(
        (timings.transport.as_str(), timings.transfer_bytes),
        ("posix", 4_096)
    );
    assert_eq!(cluster.state("one").await, State::Done);

    let seen = ar.seen.lock().unwrap().clone().unwrap();
    assert_eq!(
        (seen.prompt.as_str(), seen.template.as_str()),
        ("a red fox", "instruct")
    );
    assert!(seen.negative_row && seen.weights_id == "weights" && seen.epoch > 0);
}

#[tokio::test]
async fn without_guidance_one_row_is_enough() {
    let cluster = Cluster::start().await;
    let (ar, dit) = (Script::new([]), Script::new([]));
    let _ar = fake::join(&cluster, Role::ArStage, "ar", &ar).await;
    let _dit = fake::join(&cluster, Role::DitWorker, "dit", &dit).await;
    let mut one_row = request("one");
    one_row.guidance = Some(1.0);
    one_row.size = "128x32".into();
    let (events, error) = cluster.run(one_row).await;
    assert!(error.is_none(), "{error:?}");
    assert_eq!(accepted(&events).cost, 3 * 16);
    let seen = ar.seen.lock().unwrap().clone().unwrap();
    assert_eq!(
        (seen.negative_row, seen.width, seen.height),
        (false, 128, 32)
    );
}

#[tokio::test]
async fn a_stage_that_goes_away_before_its_first_result_is_replaced_once() {
    let cluster = Cluster::start().await;
    let (ar_a, ar_b) = (Script::new([away()]), Script::new([]));
    let (dit_a, dit_b) = (Script::new([away()]), Script::new([]));
    let _stages = [
        fake::join(&cluster, Role::ArStage, "ar-a", &ar_a).await,
        fake::join(&cluster, Role::ArStage, "ar-b", &ar_b).await,
        fake::join(&cluster, Role::DitWorker, "dit-a", &dit_a).await,
        fake::join(&cluster, Role::DitWorker, "dit-b", &dit_b).await,
    ];
    cluster.members(4).await;
    // Equals take turns by id, so "a" is asked first.
    let (events, error) = cluster.run(request("one")).await;
    assert!(error.is_none(), "{error:?}");
    assert_eq!(names(&events).last(), Some(&"done"));
    let calls = [&ar_a, &ar_b, &dit_a, &dit_b].map(Script::calls);
    assert_eq!(calls, [1, 1, 1, 1]);
}

#[tokio::test]
async fn two_members_that_go_away_are_enough() {
    let cluster = Cluster::start().await;
    let scripts = [(); 3].map(|()| Script::new([away()]));
    let dit = Script::new([]);
    let mut stages = vec![fake::join(&cluster, Role::DitWorker, "dit", &dit).await];
    for (id, script) in ["a", "b", "c"].iter().zip(&scripts) {
        stages.push(fake::join(&cluster, Role::ArStage, id, script).await);
    }
    cluster.members(4).await;
    let (_, error) = cluster.run(request("one")).await;
    assert_eq!(
        proto::status::failure(&error.unwrap()).code,
        base::Code::Unavailable
    );
    assert_eq!(scripts.iter().map(Script::calls).sum::<usize>(), 2);
}

#[tokio::test]
async fn idle_equals_take_turns() {
    let cluster = Cluster::start().await;
    let scripts = [(); 4].map(|()| Script::new([]));
    let _stages = [
        fake::join(&cluster, Role::ArStage, "ar-a", &scripts[0]).await,
        fake::join(&cluster, Role::ArStage, "ar-b", &scripts[1]).await,
        fake::join(&cluster, Role::DitWorker, "dit-a", &scripts[2]).await,
        fake::join(&cluster, Role::DitWorker, "dit-b", &scripts[3]).await,
    ];
    cluster.members(4).await;
    for id in ["one", "two", "three", "four"] {
        assert!(cluster.run(request(id)).await.1.is_none());
    }
    assert_eq!(scripts.each_ref().map(Script::calls), [2, 2, 2, 2]);
}

#[tokio::test]
async fn equals_share_the_work() {
    let cluster = Cluster::start().await;
    let ar = Script::new([]);
    // No step is made, so both requests stay under way.
    let dits = [Script::paced(0), Script::paced(0)];
    let _ar = fake::join(&cluster, Role::ArStage, "ar", &ar).await;
    let _a = fake::join(&cluster, Role::DitWorker, "dit-a", &dits[0]).await;
    let _b = fake::join(&cluster, Role::DitWorker, "dit-b", &dits[1]).await;
    cluster.members(3).await;
    // Two at once: what is under way counts, so they cannot meet on one worker.
    let mut streams = vec![];
    for id in ["one", "two"] {
        let mut stream = cluster.open(request(id)).await.unwrap();
        while !matches!(super::next(&mut stream).await.unwrap(), Event::Queued(_)) {}
        streams.push(stream);
    }
    assert_eq!(
        dits.iter().map(Script::calls).collect::<HashSet<_>>(),
        HashSet::from([1])
    );
}

#[tokio::test]
async fn images_of_one_request_share_one_prefix_and_take_their_seeds_in_order() {
    let cluster = Cluster::start().await;
    let (ar, dit) = (Script::new([]), Script::new([]));
    let _ar = fake::join(&cluster, Role::ArStage, "ar", &ar).await;
    let _dit = fake::join(&cluster, Role::DitWorker, "dit", &dit).await;
    let mut four = request("four");
    four.n = 4;
    let (events, error) = cluster.run(four).await;
    assert!(error.is_none(), "{error:?}");
    assert_eq!((ar.calls(), dit.calls()), (1, 4));
    assert_eq!(accepted(&events).cost, 4 * 3 * 2 * 16);
    let images: HashMap<u32, &proto::v1::Image> = events
        .iter()
        .filter_map(|event| match event {
            Event::Image(image) => Some((image.index, image)),
            _ => None,
        })
        .collect();
    for index in 0..4 {
        let image = images[&index];
        let seed = 7 + u64::from(index);
        assert_eq!((image.seed, image.worker.as_str()), (seed, "dit"));
        assert_eq!(image.png, seed.to_le_bytes());
        let steps: Vec<_> = events
            .iter()
            .filter_map(|event| match event {
                Event::Step(step) if step.index == index => Some(step.step),
                _ => None,
            })
            .collect();
        assert_eq!(steps, [1, 2, 3], "image {index}");
    }
    let Some(Event::Done(done)) = events.last() else {
        panic!("done comes last")
    };
    assert_eq!(done.ar_stage, "ar");
    let timings = done.timings.as_ref().unwrap();
    assert_eq!((timings.transfer_ms, timings.denoise_ms), (2.0 + 3.0, 5.0));
    assert_eq!(
        (timings.transport.as_str(), timings.transfer_bytes),
        ("posix", 4 * 4_096)
    );
}

#[tokio::test]
async fn when_one_image_fails_the_whole_request_does_and_the_others_are_dropped() {
    let cluster = Cluster::start().await;
    let broken = Failure::new(Code::Internal, "out of colours");
    let (ar, dit) = (Script::new([]), Script::new([]));
    *dit.acts.lock().unwrap() = [Act::Hang, Act::Refuse(broken), Act::Hang].into();
    let _ar = fake::join(&cluster, Role::ArStage, "ar", &ar).await;
    let _dit = fake::join(&cluster, Role::DitWorker, "dit", &dit).await;
    let mut three = request("three");
    three.n = 3;
    let (events, error) = cluster.run(three).await;
    let error = proto::status::failure(&error.unwrap());
    assert_eq!(
        (error.code, error.message.as_str()),
        (Code::Internal, "out of colours")
    );
    assert!(!events.iter().any(|event| matches!(event, Event::Image(_))));
    dit.dropped().await;
    assert_eq!(cluster.state("three").await, State::Failed);
}
