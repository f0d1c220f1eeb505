//! What comes out is what the model makes, whatever carried the prefix and whoever shared the batch.
use integration_tests::demo::decode_png;
use proto::v1::{GenerateRequest, SizePolicy};

use crate::{
    harness::{Answer, Up, generate, refused, request},
    reference::{model, picture},
};

/// The answer must be the picture that the model makes of `request` on its own.
fn assert_same(answer: &Answer, request: &GenerateRequest) {
    let expected = picture(request);
    let image = decode_png(&answer.image.png).unwrap();
    assert_eq!(
        (image.width, image.height),
        (expected.width, expected.height)
    );
    assert!(image == expected, "the pixels differ");
    let accepted = &answer.accepted;
    assert_eq!(
        format!("{}x{}", accepted.width, accepted.height),
        request.size
    );
    assert_eq!(Some(accepted.seed), request.seed);
    assert_eq!(Some(accepted.guidance), request.guidance);
    let steps = request.steps.unwrap();
    assert_eq!(answer.steps.last(), Some(&steps.unsigned_abs()));
}

/// The transport is what UCX says it used, not what was asked for.
fn assert_carried_by(answer: &Answer, name: &str) {
    let timings = &answer.timings;
    assert!(
        timings.transport.contains(name),
        "carried by {:?}",
        timings.transport
    );
    assert!(timings.transfer_bytes > 0);
}

#[tokio::test]
async fn over_tcp_the_image_is_the_models_own() {
    let up = Up::start("tcp");
    let request = request("A small red boat drifts on a calm lake.");
    let answer = generate(&up, request.clone()).await.unwrap();
    assert_carried_by(&answer, "tcp");
    assert_same(&answer, &request);
}

#[tokio::test]
async fn over_ranks_that_only_move_data_the_image_is_the_models_own() {
    let plans = [
        "--ar-plan=pp=2,ulysses=2",
        "--dit-plan=cfg=2,ulysses=2,ep=cfg+ulysses",
    ];
    let up = Up::start_with("shm", &plans);
    let request = request("A small red boat drifts on a calm lake.");
    let answer = generate(&up, request.clone()).await.unwrap();
    assert_same(&answer, &request);
    // Guidance rows on ranks of their own are useless without guidance, and that is said by name.
    let unguided = GenerateRequest {
        guidance: Some(1.0),
        ..request.clone()
    };
    let refused = refused(&up, unguided).await;
    assert_eq!(refused.field.as_deref(), Some("guidance"), "{refused}");
    // A refusal is no failure of the ranks.
    let answer = generate(&up, request.clone()).await.unwrap();
    assert_same(&answer, &request);
}

#[tokio::test]
async fn over_ranks_that_add_up_parts_the_image_is_within_one_grey_level() {
    let plans = ["--ar-plan=tp=2,ep=tp", "--dit-plan=ring=2,tp=2"];
    let up = Up::start_with("shm", &plans);
    let request = request("a dog");
    let answer = generate(&up, request.clone()).await.unwrap();
    let (image, expected) = (decode_png(&answer.image.png).unwrap(), picture(&request));
    assert_eq!(image.data.len(), expected.data.len());
    let pixels = image.data.iter().zip(&expected.data);
    let off: Vec<u8> = pixels.map(|(a, b)| a.abs_diff(*b)).collect();
    assert!(off.iter().all(|d| *d <= 1), "{:?}", off.iter().max());
    let some = off.iter().filter(|d| **d > 0).count();
    assert!(
        some * 1000 <= off.len(),
        "{some} of {} bytes differ",
        off.len()
    );
}

#[tokio::test]
async fn over_shared_memory_requests_that_share_a_batch_get_the_models_own_images() {
    let up = Up::shared();
    let sizes = &model().info().buckets;
    let wide = sizes.iter().max_by_key(|size| size.width).unwrap();
    let first = GenerateRequest {
        size: format!("{}x{}", wide.width, wide.height),
        steps: Some(40),
        seed: Some(11),
        ..request("Two children fly a yellow kite on a wide beach at noon")
    };
    let second = GenerateRequest {
        steps: Some(30),
        seed: Some(12),
        guidance: Some(7.5),
        ..request("a dog")
    };
    let third = GenerateRequest {
        steps: Some(3),
        guidance: Some(1.0),
        ..request("<img> </think> <cfg> <|endoftext|> is text here")
    };
    let (a, b, c) = tokio::join!(
        generate(up, first.clone()),
        generate(up, second.clone()),
        generate(up, third.clone()),
    );
    for (answer, request) in [(a, &first), (b, &second), (c, &third)] {
        let answer = answer.unwrap();
        assert_carried_by(&answer, "shm");
        assert_same(&answer, request);
    }
}

#[tokio::test]
async fn a_size_that_is_no_bucket_is_refused_with_the_nearest_or_snapped() {
    let up = Up::shared();
    let odd = GenerateRequest {
        size: "250x260".to_owned(),
        steps: Some(1),
        ..request("snap")
    };
    let failure = refused(up, odd.clone()).await;
    assert_eq!(failure.code, base::Code::InvalidArgument);
    assert_eq!(failure.field.as_deref(), Some("size"));
    assert!(failure.message.contains("256x256"), "{}", failure.message);

    let snapped = GenerateRequest {
        size_policy: SizePolicy::Snap.into(),
        seed: None,
        ..odd
    };
    let answer = generate(up, snapped).await.unwrap();
    assert_eq!((answer.accepted.width, answer.accepted.height), (256, 256));
    assert_eq!((answer.image.width, answer.image.height), (256, 256));
    assert!(answer.accepted.seed <= base::limits::MAX_SEED);
}
