//! Clients that send a request again, to the other router, until they have their picture.
use std::time::Duration;

use base::rng::Source;
use proto::v1::{
    CancelRequest, GenerateRequest, LossPolicy, Priority, generate_response::Event,
    image_service_client::ImageServiceClient,
};
use tonic::{Code, Request, Status, transport::Channel};
use turmoil::Sim;

use super::{Judge, ROUTERS, hosts, stages};

/// By when a client must have every picture; all faults are over long before.
const PATIENCE: Duration = Duration::from_secs(150);
/// Deadline of one try.
const TRY: Duration = Duration::from_secs(40);
/// How much longer than its deadline a try may take: the way back.
const SLACK: Duration = Duration::from_secs(15);
/// Pause before a request is sent again.
const PAUSE: Duration = Duration::from_millis(300);
/// Names of the clients.
const NAMES: [&str; 6] = [
    "client-0", "client-1", "client-2", "client-3", "client-4", "client-5",
];

/// What one client wants.
#[derive(Debug, Clone)]
struct Wish {
    request: GenerateRequest,
    after: Duration,
    /// Cancels at this step, if it comes to it.
    cancel_at: Option<u32>,
    first: usize,
}

pub(super) fn add(sim: &mut Sim<'_>, number: usize, dice: &Source, judge: &Judge) {
    let wishes: Vec<_> = (0..2).map(|turn| wish((number, turn), dice)).collect();
    let judge = judge.clone();
    sim.client(NAMES[number], async move {
        for wish in wishes {
            tokio::time::sleep(wish.after).await;
            until_done(&wish, &judge).await;
        }
        Ok(())
    });
}

fn wish((number, turn): (usize, usize), dice: &Source) -> Wish {
    let steps = 3 + i32::try_from(dice.below(25)).unwrap();
    let priority = [
        Priority::Interactive,
        Priority::Standard,
        Priority::Background,
    ];
    let losses = [LossPolicy::Fail, LossPolicy::Recompute, LossPolicy::Wait];
    let request = GenerateRequest {
        request_id: format!("c{number}-{turn}"),
        prompt: format!("picture {turn} of client {number}"),
        steps: Some(steps),
        n: u32::try_from(1 + dice.below(3) / 2).unwrap(),
        priority: priority[usize::try_from(dice.below(3)).unwrap()].into(),
        on_prefix_loss: losses[usize::try_from(dice.below(3)).unwrap()].into(),
        ..GenerateRequest::default()
    };
    let cancels = dice.below(8) == 0;
    Wish {
        request,
        after: Duration::from_millis(dice.below(6_000)),
        cancel_at: cancels.then(|| u32::try_from(1 + dice.below(10)).unwrap()),
        first: usize::try_from(dice.below(2)).unwrap(),
    }
}

/// How a try ended.
enum Ended {
    Well,
    Cancelled,
    Badly(Status),
}

async fn until_done(wish: &Wish, judge: &Judge) {
    let (id, began) = (&wish.request.request_id, tokio::time::Instant::now());
    for attempt in 0.. {
        let router = ROUTERS[(wish.first + attempt) % 2];
        let tried = tokio::time::timeout(TRY + SLACK, once(wish, router, judge)).await;
        let Ok(ended) = tried else {
            judge.wrong(format!("{id} hung at {router}"));
            return;
        };
        match ended {
            Ended::Well => {
                judge.note(format!("{id} done at {router}"));
                return judge.picture();
            }
            Ended::Cancelled => {
                judge.note(format!("{id} cancelled at {router}"));
                return judge.cancelled();
            }
            Ended::Badly(status) => {
                judge.note(format!(
                    "{id} failed at {router}: {:?} {}",
                    status.code(),
                    status.message()
                ));
                if !again(status.code()) {
                    return judge.wrong(format!("{id} was refused: {status:?}"));
                }
            }
        }
        if began.elapsed() > PATIENCE {
            return judge.wrong(format!("{id} is lost"));
        }
        judge.retried();
        tokio::time::sleep(PAUSE).await;
    }
}

/// What a client may answer by sending the same once more.
fn again(code: Code) -> bool {
    // Unknown and Internal: what the transport makes of a connection that broke in the middle.
    matches!(
        code,
        Code::Unavailable
            | Code::Aborted
            | Code::ResourceExhausted
            | Code::DeadlineExceeded
            | Code::Cancelled
            | Code::Unknown
            | Code::Internal
    )
}

async fn once(wish: &Wish, router: &str, judge: &Judge) -> Ended {
    let channel = proto::channel::lazy(&hosts::address(router)).unwrap();
    let mut client = ImageServiceClient::new(channel);
    let mut request = Request::new(wish.request.clone());
    request.set_timeout(TRY);
    match client.generate(request).await {
        Ok(answer) => read(wish, answer.into_inner(), client, judge).await,
        Err(status) => Ended::Badly(status),
    }
}

async fn read(
    wish: &Wish,
    mut stream: tonic::Streaming<proto::v1::GenerateResponse>,
    mut client: ImageServiceClient<Channel>,
    judge: &Judge,
) -> Ended {
    let (id, mut seed, mut images, mut last) = (&wish.request.request_id, 0, 0, [0; 2]);
    let steps = wish.request.steps.unwrap_or_default().unsigned_abs();
    loop {
        let event = match stream.message().await {
            Ok(Some(message)) => message.event,
            Ok(None) => return Ended::Badly(Status::unavailable("ended without its last word")),
            Err(status) => return Ended::Badly(status),
        };
        match event {
            Some(Event::Accepted(accepted)) => seed = accepted.seed,
            Some(Event::Step(step)) => {
                let told = &mut last[step.index as usize];
                if step.step <= *told {
                    judge.wrong(format!("{id} was told of step {} after {told}", step.step));
                }
                *told = step.step;
                if wish.cancel_at.is_some_and(|at| step.step >= at) {
                    let request_id = id.clone();
                    let _ = client.cancel(CancelRequest { request_id }).await;
                    return Ended::Cancelled;
                }
            }
            Some(Event::Image(image)) => {
                images += 1;
                let right = stages::picture(&wish.request.prompt, image.seed, steps);
                if image.png != right || image.seed != seed + u64::from(image.index) {
                    judge.wrong(format!("{id} got another picture"));
                }
            }
            Some(Event::Done(_)) => {
                if images != wish.request.n {
                    judge.wrong(format!("{id} got {images} of {} pictures", wish.request.n));
                }
                return Ended::Well;
            }
            _ => {}
        }
    }
}
