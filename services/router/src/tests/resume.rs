//! Denoising that goes on elsewhere after a worker was lost, and previews on the way.
use base::Code;
use proto::v1::{PreviewKind, Priority, generate_response::Event};
use registry::Role;

use super::{
    Cluster, collect,
    fake::{self, Script, Stage},
    next, request,
};

/// Reads until the client is told of `step`.
async fn until(stream: &mut tonic::Streaming<proto::v1::GenerateResponse>, step: u32) {
    while !matches!(next(stream).await.unwrap(), Event::Step(done) if done.step == step) {}
}

struct Two {
    cluster: Cluster,
    scripts: [Script; 2],
    stages: Vec<Stage>,
}

impl Two {
    /// Two workers that may do `steps` steps each.
    async fn start(steps: usize) -> Self {
        let cluster = Cluster::start().await;
        let scripts = [Script::paced(steps), Script::paced(steps)];
        let mut stages = vec![fake::join(&cluster, Role::ArStage, "ar", &Script::new([])).await];
        for (id, script) in ["a", "b"].into_iter().zip(&scripts) {
            stages.push(fake::join(&cluster, Role::DitWorker, id, script).await);
        }
        cluster.members(3).await;
        Self {
            cluster,
            scripts,
            stages,
        }
    }

    /// Number of the worker that was called, and of the other.
    fn called(&self) -> (usize, usize) {
        let first = usize::from(self.scripts[0].calls() == 0);
        (first, 1 - first)
    }
}

#[tokio::test]
async fn a_worker_killed_on_the_way_costs_the_steps_since_its_last_checkpoint_and_no_error() {
    let mut two = Two::start(3).await;
    let mut wish = request("one");
    wish.steps = Some(6);
    let mut stream = two.cluster.open(wish).await.unwrap();
    until(&mut stream, 3).await;
    let (killed, other) = two.called();
    two.stages[1 + killed].kill();
    two.scripts[other].steps.add_permits(1);
    let (events, error) = collect(stream).await;
    assert!(error.is_none(), "{error:?}");
    let asked = two.scripts[other].asked.lock().unwrap().clone().unwrap();
    let from = asked.resume.unwrap();
    assert_eq!((from.step, from.latents, from.crc32c), (2, vec![2; 8], 7));
    let steps: Vec<u32> = events
        .iter()
        .filter_map(|event| match event {
            Event::Step(step) => Some(step.step),
            _ => None,
        })
        .collect();
    assert_eq!(steps, [4, 5, 6], "no step is told twice");
    assert!(matches!(events.last(), Some(Event::Done(_))));
}

#[tokio::test]
async fn a_worker_killed_before_its_first_checkpoint_costs_all_its_steps_and_no_error() {
    let mut two = Two::start(1).await;
    let mut stream = two.cluster.open(request("one")).await.unwrap();
    until(&mut stream, 1).await;
    let (killed, other) = two.called();
    two.stages[1 + killed].kill();
    two.scripts[other].steps.add_permits(8);
    let (events, error) = collect(stream).await;
    assert!(error.is_none(), "{error:?}");
    let asked = two.scripts[other].asked.lock().unwrap().clone().unwrap();
    assert!(asked.resume.is_none());
    assert!(matches!(events.last(), Some(Event::Done(_))));
}

#[tokio::test]
async fn previews_come_once_each_and_only_as_many_as_were_asked_for() {
    let cluster = Cluster::start().await;
    let (ar, dit) = (Script::new([]), Script::new([]));
    let _ar = fake::join(&cluster, Role::ArStage, "ar", &ar).await;
    let _dit = fake::join(&cluster, Role::DitWorker, "dit", &dit).await;
    let mut wish = request("one");
    wish.previews = 2;
    wish.preview_kind = PreviewKind::Vae.into();
    wish.priority = Priority::Background.into();
    let (events, error) = cluster.run(wish).await;
    assert!(error.is_none(), "{error:?}");
    let previews: Vec<_> = events
        .iter()
        .filter_map(|event| match event {
            Event::Preview(preview) => Some((preview.number, preview.png.clone())),
            _ => None,
        })
        .collect();
    assert_eq!(previews, [(0, vec![1]), (1, vec![2])]);
    let asked = dit.asked.lock().unwrap().clone().unwrap();
    assert_eq!(asked.preview_kind(), PreviewKind::Vae);
    assert_eq!(asked.priority(), Priority::Background);
    let mut four = request("four");
    four.previews = 4;
    let error = proto::status::failure(&cluster.run(four).await.1.unwrap());
    assert_eq!(error.code, Code::InvalidArgument);
    assert_eq!(error.field.as_deref(), Some("previews"));
}
