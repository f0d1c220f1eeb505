//! The demo model behind the whole system: what it writes, draws and edits through gRPC and HTTP, judged by
//! what the pictures show.

use base64::{Engine as _, engine::general_purpose::STANDARD};
use integration_tests::{
    cluster::{Up, bounded},
    demo::{DemoEdit, DemoPrompt, MAX_NEW_TOKENS, SEED, checkpoint_dir, decode_png, encode_png},
    scene::{draw, judge, read},
    web,
};
use model::RgbImage;
use proto::v1::{
    Done, GenerateRequest, Image, InputImage, Mode, Sampling, Written, generate_response::Event,
    input_image::Source,
};
use serde_json::{Value, json};

use crate::{assert_share, set, studio};

/// Least share of right pictures where the model writes before it draws, as in one process.
const INSTRUCT: f64 = 0.75;
/// Every so many prompts with one or two objects.
const EVERY: usize = 36;
/// Pictures of one size, so that they may share steps.
const AT_ONCE: usize = 4;

/// The demo model behind all roles.
fn up() -> &'static Up {
    static UP: std::sync::OnceLock<Up> = std::sync::OnceLock::new();
    UP.get_or_init(|| Up::start_on(&checkpoint_dir(), "shm", &[]))
}

/// Everything that one gRPC request answered.
#[derive(Debug, Default)]
struct Told {
    text: String,
    written: Option<Written>,
    images: Vec<Image>,
    done: Option<Done>,
}

async fn generate(request: GenerateRequest) -> Told {
    let mut stream = bounded(up().client().generate(request))
        .await
        .unwrap()
        .into_inner();
    let mut told = Told::default();
    while let Some(response) = bounded(stream.message()).await.unwrap() {
        match response.event.unwrap() {
            Event::Text(delta) => {
                assert!(told.written.is_none(), "text after all of it");
                told.text += &delta.text;
            }
            Event::Written(written) => told.written = Some(written),
            Event::Image(image) => told.images.push(image),
            Event::Done(done) => told.done = Some(done),
            _ => {}
        }
    }
    told
}

fn pixels(png: &[u8]) -> RgbImage {
    decode_png(png).unwrap()
}

/// A request whose prompt the model rewrites, and whose size it names.
fn recaption(prompt: &str) -> GenerateRequest {
    GenerateRequest {
        prompt: prompt.to_owned(),
        mode: Mode::ThinkRecaption.into(),
        size: "auto".to_owned(),
        template: "instruct".to_owned(),
        seed: Some(SEED),
        sampling: Some(Sampling {
            max_new_tokens: Some(MAX_NEW_TOKENS as u32),
            ..Sampling::default()
        }),
        ..GenerateRequest::default()
    }
}

fn subset() -> Vec<&'static DemoPrompt> {
    let prompts = set().prompts.iter();
    let simple = prompts.filter(|entry| ["single", "two"].contains(&entry.category.as_str()));
    simple.skip(5).step_by(EVERY).collect()
}

#[tokio::test]
async fn recaptions_over_grpc_are_the_models_own_and_are_drawn() {
    let entries = subset();
    let mut wrong = Vec::new();
    for chunk in entries.chunks(AT_ONCE) {
        let requests = chunk.iter().map(|entry| generate(recaption(&entry.prompt)));
        let answers = futures_util::future::join_all(requests).await;
        for (entry, told) in chunk.iter().zip(answers) {
            let written = told.written.unwrap();
            // Batched with others, over processes: the text is that of the model alone.
            let own = studio().recaption(&entry.prompt).unwrap();
            assert_eq!((&told.text, &written.text), (&own.text, &own.text));
            let bucket = own.bucket.unwrap();
            let size = (written.width as usize, written.height as usize);
            assert_eq!(size, (bucket.width, bucket.height), "{}", entry.id);
            assert!(!written.cut && !written.size_fallback);
            // All of the prompt but the ratio token stands in both rows or was computed while writing.
            let read_tokens = told.done.unwrap().prefix_tokens;
            assert_eq!(written.reused_tokens + 1, read_tokens, "{}", entry.id);
            wrong.extend(entry.missing_in(&written.text));
            let seen = judge(&read(&pixels(&told.images[0].png)), &entry.expect);
            wrong.extend(seen.map(|why| format!("{} \"{}\": {why}", entry.id, entry.prompt)));
        }
    }
    assert_share("recaptions over gRPC", &wrong, entries.len(), INSTRUCT);
}

/// The source of an edit as a file.
fn source(entry: &DemoEdit) -> Vec<u8> {
    encode_png(&draw(&entry.source)).unwrap()
}

/// Edits at fixed places of the list.
fn edits() -> Vec<&'static DemoEdit> {
    set().edits.iter().skip(2).step_by(4).take(2).collect()
}

#[tokio::test]
async fn edits_over_grpc_do_what_they_say_and_keep_the_rest() {
    let requests = edits().into_iter().map(|entry| async move {
        let image = InputImage {
            source: Some(Source::Data(source(entry))),
        };
        let told = generate(GenerateRequest {
            prompt: entry.prompt.clone(),
            images: vec![image],
            seed: Some(SEED),
            ..GenerateRequest::default()
        })
        .await;
        let written = told.written.unwrap();
        assert_eq!(
            (written.width, written.height),
            (256, 256),
            "that of the picture"
        );
        let wrong = entry.judge(&read(&pixels(&told.images[0].png)));
        assert_eq!(wrong, None, "{} \"{}\"", entry.id, entry.prompt);
        told.images[0].png.clone()
    });
    let pictures = futures_util::future::join_all(requests).await;
    // Bit for bit what the model makes in one process.
    let entry = edits()[0];
    let (_, job) = studio().edit(entry).unwrap();
    let own = studio().develop(&mut [job]).unwrap();
    assert!(pixels(&pictures[0]) == own[0], "{}: other pixels", entry.id);
}

#[tokio::test]
async fn images_of_an_edit_are_those_of_their_seeds_and_take_the_shape_of_the_picture() {
    let entry = edits()[1];
    // Wider than any size of the model: the middle of the drawing.
    let whole = draw(&entry.source);
    let rows = 40..190;
    let cut = RgbImage {
        width: whole.width,
        height: rows.len(),
        data: whole.data[rows.start * whole.width * 3..rows.end * whole.width * 3].to_vec(),
    };
    let request = |n: u32, seed: u64| GenerateRequest {
        prompt: entry.prompt.clone(),
        images: vec![InputImage {
            source: Some(Source::Data(encode_png(&cut).unwrap())),
        }],
        n,
        seed: Some(seed),
        steps: Some(2),
        align_image_size: true,
        sampling: Some(Sampling {
            seed: Some(SEED),
            ..Sampling::default()
        }),
        ..GenerateRequest::default()
    };
    let both = generate(request(2, SEED)).await;
    let second = generate(request(1, SEED + 1)).await;
    let of = |told: &Told, seed: u64| {
        let image = told.images.iter().find(|image| image.seed == seed).unwrap();
        pixels(&image.png)
    };
    let (first, again) = (of(&both, SEED), of(&both, SEED + 1));
    assert!(again == of(&second, SEED + 1) && first != again);
    // 256 x 150 at the area of 256 x 256.
    assert_eq!((first.width, first.height), (334, 196));
    let written = both.written.unwrap();
    assert_eq!((written.width, written.height), (334, 196));
}

/// A form with the fields and files of an edit.
fn form(entry: &DemoEdit) -> Vec<u8> {
    let mut form = Vec::new();
    for (name, value) in [("prompt", entry.prompt.clone()), ("seed", SEED.to_string())] {
        let head = format!("--edge\r\nContent-Disposition: form-data; name=\"{name}\"\r\n\r\n");
        form.extend_from_slice(head.as_bytes());
        form.extend_from_slice(value.as_bytes());
        form.extend_from_slice(b"\r\n");
    }
    let head = "--edge\r\nContent-Disposition: form-data; name=\"image[]\"; filename=\"a.png\"\r\n\
        Content-Type: image/png\r\n\r\n";
    form.extend_from_slice(head.as_bytes());
    form.extend_from_slice(&source(entry));
    form.extend_from_slice(b"\r\n--edge--\r\n");
    form
}

#[tokio::test]
async fn edits_over_http_do_what_they_say_as_a_form_and_as_json() {
    let entries = edits();
    let as_form = web::post(
        "/v1/images/edits",
        "multipart/form-data; boundary=edge",
        form(entries[0]),
    );
    let url = format!(
        "data:image/png;base64,{}",
        STANDARD.encode(source(entries[1]))
    );
    let as_json = json!({ "prompt": entries[1].prompt, "seed": SEED, "image": [url] });
    let (a, b) = tokio::join!(
        web::send(up().http(), as_form),
        web::post_json(up().http(), "/v1/images/edits", &as_json),
    );
    for (entry, answer) in entries.iter().zip([a, b]) {
        assert_eq!(answer.status, 200, "{}", answer.text);
        let answer = answer.json();
        assert_eq!(answer["size"], "256x256");
        let png = STANDARD
            .decode(answer["data"][0]["b64_json"].as_str().unwrap())
            .unwrap();
        let wrong = entry.judge(&read(&pixels(&png)));
        assert_eq!(wrong, None, "{} \"{}\"", entry.id, entry.prompt);
    }
}

/// Modes, whether the size is left to the model, and how their text begins and ends.
const MODES: [(Mode, bool, &str, &str); 7] = [
    (Mode::Image, true, "", ""),
    (Mode::Think, false, "<think>", "</think>"),
    (Mode::Think, true, "<think>", "</think>"),
    (Mode::Recaption, false, "<recaption>", "</recaption>"),
    (Mode::Recaption, true, "<recaption>", "</recaption>"),
    (Mode::ThinkRecaption, false, "<think>", "</recaption>"),
    (Mode::ThinkRecaption, true, "<think>", "</recaption>"),
];

#[tokio::test]
async fn every_mode_writes_what_it_should_and_makes_a_picture() {
    let requests = MODES.iter().map(|&(mode, auto, ..)| {
        generate(GenerateRequest {
            mode: mode.into(),
            size: if auto { "auto" } else { "192x320" }.to_owned(),
            steps: Some(1),
            sampling: (mode != Mode::Image)
                .then_some(recaption("").sampling)
                .flatten(),
            ..recaption("a tall picture of a pink heart")
        })
    });
    let answers = futures_util::future::join_all(requests).await;
    for ((mode, auto, opening, closing), told) in MODES.iter().zip(answers) {
        let written = told.written.unwrap();
        let what = format!("{mode:?}, auto {auto}: {written:?}");
        assert_eq!(told.text, written.text, "{what}");
        assert!(written.text.starts_with(opening), "{what}");
        assert!(written.text.ends_with(closing), "{what}");
        assert!(!written.cut && !written.size_fallback, "{what}");
        // The words of the prompt choose this size as well.
        assert_eq!((written.width, written.height), (192, 320), "{what}");
        assert_eq!((told.images[0].width, told.images[0].height), (192, 320));
    }
}

#[tokio::test]
async fn a_recaption_over_http_is_drawn_and_one_without_its_thoughts_reads_less() {
    let entry = subset()[0];
    let drawn = |drop_think: bool, steps: Option<u32>| async move {
        let body = json!({
            "prompt": entry.prompt, "mode": "think_recaption", "size": "auto",
            "template": "instruct", "seed": SEED, "max_new_tokens": MAX_NEW_TOKENS,
            "drop_think": drop_think, "steps": steps,
        });
        let answer = web::post_json(up().http(), "/v1/images/generations", &body).await;
        assert_eq!(answer.status, 200, "{}", answer.text);
        let answer = answer.json();
        let png = STANDARD
            .decode(answer["data"][0]["b64_json"].as_str().unwrap())
            .unwrap();
        (answer["omni"]["writing"].clone(), pixels(&png))
    };
    let ((whole, picture), (dropped, _)) = tokio::join!(drawn(false, None), drawn(true, Some(2)));
    let seen = judge(&read(&picture), &entry.expect);
    assert_eq!(seen, None, "{} \"{}\"", entry.id, entry.prompt);
    // The text is told in full either way, but it is not what the second picture was drawn from.
    assert_eq!(whole["text"], dropped["text"]);
    assert!(dropped["reused_tokens"].as_u64() < whole["reused_tokens"].as_u64());
}

#[tokio::test]
async fn recaptions_over_http_are_told_as_they_are_written_and_images_share_them() {
    let entry = subset()[0];
    let body = json!({
        "prompt": entry.prompt, "mode": "think_recaption", "size": "auto", "template": "instruct",
        "seed": SEED, "n": 2, "steps": 2, "max_new_tokens": MAX_NEW_TOKENS, "stream": true,
    });
    let answer = web::post_json(up().http(), "/v1/images/generations", &body).await;
    let events = answer.events();
    let text: String = events
        .iter()
        .filter(|(name, _)| name == "omni.text")
        .map(|(_, data)| data["omni"]["text"].as_str().unwrap())
        .collect();
    let own = studio().recaption(&entry.prompt).unwrap();
    assert_eq!(text, own.text);
    let pieces = events
        .iter()
        .filter(|(name, _)| name == "omni.text")
        .count();
    assert!(pieces > 3, "the text came in {pieces} pieces");
    let last = &events.last().unwrap().1;
    assert_eq!(last["omni"]["writing"]["text"], own.text);
    assert_eq!(last["omni"]["images"].as_array().unwrap().len(), 2);
}

/// The answer of a chat in words, and why it ended.
async fn words(more: Value) -> (String, Value) {
    let url = format!(
        "data:image/png;base64,{}",
        STANDARD.encode(source(edits()[0]))
    );
    let mut body = json!({
        "messages": [{ "role": "user", "content": [
            { "type": "image_url", "image_url": { "url": url } },
            { "type": "text", "text": "what is this?" },
        ] }],
        "modalities": ["text"], "max_tokens": 12, "template": "instruct", "seed": 3,
    });
    body.as_object_mut()
        .unwrap()
        .extend(more.as_object().unwrap().clone());
    let answer = web::post_json(up().http(), "/v1/chat/completions", &body).await;
    assert_eq!(answer.status, 200, "{}", answer.text);
    let choice = answer.json()["choices"][0].clone();
    let text = choice["message"]["content"].as_str().unwrap().to_owned();
    (text, choice["finish_reason"].clone())
}

#[tokio::test]
async fn a_picture_is_talked_about_and_sampling_follows_its_seed() {
    // The model was never taught to chat: that it answers, and how it is told, is all that is looked at.
    let (greedy, finish) = words(json!({})).await;
    assert!(!greedy.is_empty());
    assert!(finish == "length" || finish == "stop", "{finish}");
    assert_eq!(words(json!({})).await.0, greedy);
    let sampled =
        |seed: u64| words(json!({ "temperature": 2.0, "top_k": 200, "sampling_seed": seed }));
    let (one, again, other) = tokio::join!(sampled(1), sampled(1), sampled(2));
    assert_eq!(one, again);
    assert_ne!(one.0, other.0);
}

#[tokio::test]
async fn a_text_that_is_cut_is_told_over_grpc_and_drawn_all_the_same() {
    let mut cut = recaption("a red circle");
    cut.steps = Some(1);
    cut.sampling = Some(Sampling {
        max_new_tokens: Some(4),
        ..Sampling::default()
    });
    let told = generate(cut).await;
    let written = told.written.unwrap();
    assert!(written.cut && written.size_fallback, "{written:?}");
    assert_eq!(
        (written.tokens, written.width, written.height),
        (4, 256, 256)
    );
    assert_eq!(told.images.len(), 1);
}
