//! The whole system with both stages on a GPU: what clients get for prompts of the demo model.

use std::sync::OnceLock;

use futures_util::future::join_all;
use integration_tests::cluster::{Up, bounded};
use integration_tests::demo::{DemoPrompt, DemoSet, SEED, checkpoint_dir, decode_png};
use integration_tests::scene::{judge, read};
use model::RgbImage;
use proto::v1::{GenerateRequest, InputImage, Mode, generate_response::Event, input_image::Source};

/// Every so many of the held-out prompts.
const EVERY: usize = 12;
/// Least share of right pictures, as in one process.
const RIGHT: f64 = 0.85;

fn up() -> &'static Up {
    static UP: OnceLock<Up> = OnceLock::new();
    UP.get_or_init(|| Up::start_on(&checkpoint_dir(), "shm", &["--device", "cuda"]))
}

fn entries() -> Vec<DemoPrompt> {
    let all = DemoSet::load().unwrap().prompts;
    all.into_iter().step_by(EVERY).collect()
}

fn request(entry: &DemoPrompt) -> GenerateRequest {
    GenerateRequest {
        prompt: entry.prompt.clone(),
        seed: Some(SEED),
        ..GenerateRequest::default()
    }
}

/// The PNG that a request came to.
async fn png(request: GenerateRequest) -> Vec<u8> {
    let mut stream = bounded(up().client().generate(request))
        .await
        .unwrap()
        .into_inner();
    let mut image = Vec::new();
    while let Some(response) = bounded(stream.message()).await.unwrap() {
        if let Some(Event::Image(made)) = response.event {
            image = made.png;
        }
    }
    image
}

fn pixels(png: &[u8]) -> RgbImage {
    decode_png(png).unwrap()
}

/// All at once, so that they share steps, and then one after the other.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs a Hopper GPU"]
async fn pictures_show_what_was_asked_for_and_are_those_of_requests_alone() {
    let entries = entries();
    let together = join_all(entries.iter().map(|entry| png(request(entry)))).await;
    let mut wrong = Vec::new();
    for (entry, packed) in entries.iter().zip(&together) {
        assert!(
            png(request(entry)).await == *packed,
            "{}: another picture in company",
            entry.prompt
        );
        if let Some(what) = judge(&read(&pixels(packed)), &entry.expect) {
            wrong.push(format!("{}: {what}", entry.prompt));
        }
    }
    let right = entries.len() - wrong.len();
    println!("{right} of {} are right", entries.len());
    assert!(
        right as f64 >= RIGHT * entries.len() as f64,
        "{}",
        wrong.join("\n")
    );
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs a Hopper GPU"]
async fn texts_are_written_and_pictures_are_edited() {
    let recaption = GenerateRequest {
        prompt: "a tall picture of a pink heart".to_owned(),
        mode: Mode::ThinkRecaption.into(),
        size: "auto".to_owned(),
        template: "instruct".to_owned(),
        seed: Some(SEED),
        ..GenerateRequest::default()
    };
    let drawn = png(recaption).await;
    let picture = pixels(&drawn);
    assert!(picture.height > picture.width, "not tall");
    let edit = GenerateRequest {
        prompt: "make it blue".to_owned(),
        images: vec![InputImage {
            source: Some(Source::Data(drawn.clone())),
        }],
        seed: Some(SEED),
        ..GenerateRequest::default()
    };
    assert_ne!(png(edit).await, drawn);
}
