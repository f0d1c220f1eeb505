//! A worker that is drained under load loses nothing: it finishes what it can in its grace and hands the rest
//! over, and every image is the one that it would have been.
use futures_util::future::join_all;
use proto::v1::{
    DrainRequest, GenerateRequest, Role, SizePolicy, admin_service_client::AdminServiceClient,
};

use crate::harness::{Answer, Up, bounded, generate, request, wait};
use crate::resume::{Extra, PATIENCE};

/// Requests in the making at the time of the drain, of several sizes, with and without guidance.
fn wishes(steps: i32) -> Vec<GenerateRequest> {
    let wish = |index: i32| GenerateRequest {
        steps: Some(steps + index),
        seed: Some(100 + u64::from(index.unsigned_abs())),
        guidance: Some(if index % 3 == 0 { 1.0 } else { 3.0 }),
        size: ["256x256", "400x200", "200x300"][index as usize % 3].to_owned(),
        size_policy: SizePolicy::Snap.into(),
        ..request("drawn while a worker leaves")
    };
    (0..6).map(wish).collect()
}

async fn all(up: &Up, wishes: &[GenerateRequest]) -> Vec<Answer> {
    let each = wishes.iter().map(|wish| generate(up, wish.clone()));
    // Each of them waits for each of its messages no longer than it may.
    let answers = join_all(each).await;
    answers.into_iter().map(Result::unwrap).collect()
}

/// Draws `wishes` on two workers of which one is drained in the middle; its id, and the images.
async fn drained(up: &Up, wishes: &[GenerateRequest], grace: &str) -> (Extra, Vec<Answer>) {
    let mut extra = Extra::start(up, grace).await;
    let drain = async {
        // As `omnictl drain` asks, once the worker is at several requests.
        let busy = async {
            while load(up, &extra.id).await < 2 {
                tokio::time::sleep(std::time::Duration::from_millis(20)).await;
            }
        };
        bounded(busy).await;
        let mut admin = AdminServiceClient::new(up.channel());
        let member_id = extra.id.clone();
        admin.drain(DrainRequest { member_id }).await.unwrap();
    };
    let both = Box::pin(async { tokio::join!(all(up, wishes), drain) });
    let (answers, ()) = both.await;
    let ended = wait(&mut extra.process, PATIENCE);
    assert!(ended.is_some_and(|status| status.success()), "{ended:?}");
    (extra, answers)
}

async fn load(up: &Up, id: &str) -> u32 {
    let members = up.members().await;
    let member = members.iter().find(|member| member.id == id);
    assert_eq!(member.unwrap().role(), Role::DitWorker);
    let load = member.and_then(|member| member.load).unwrap_or_default();
    load.running + load.queued
}

#[tokio::test]
async fn a_drain_under_load_loses_nothing_whether_requests_end_in_the_grace_or_are_handed_over() {
    let up = Up::start("shm");
    // A grace that no request outlasts, and one that most do.
    for (steps, grace, handed) in [(4, "100", false), (24, "1", true)] {
        let wishes = wishes(steps);
        let undisturbed = Box::pin(all(&up, &wishes)).await;
        let (extra, answers) = Box::pin(drained(&up, &wishes, grace)).await;
        for (index, (got, want)) in answers.iter().zip(&undisturbed).enumerate() {
            assert!(
                got.image.png == want.image.png,
                "request {index}: other bytes"
            );
            assert!(
                got.steps.windows(2).all(|pair| pair[0] < pair[1]),
                "request {index}: a step is told twice: {:?}",
                got.steps
            );
        }
        let there = |answer: &&Answer| answer.image.worker == extra.id;
        let finished = answers.iter().filter(there).count();
        let handed_over = extra.log().matches("job handed over").count();
        assert_eq!(
            handed_over > 0,
            handed,
            "{finished} finished: {}",
            extra.log()
        );
        assert!(handed || finished > 0, "{}", extra.log());
    }
}
