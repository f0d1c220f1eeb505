//! The pictures themselves: those that gRPC makes, in any format, streamed or not.
use base64::{Engine as _, engine::general_purpose::STANDARD};
use integration_tests::{
    cluster::{self, Up},
    web,
};
use proto::v1::GenerateRequest;
use serde_json::{Value, json};

use crate::{CHAT, IMAGES, conform::assert_conforms, wish, with};

const BOAT: &str = "A small red boat drifts on a calm lake.";

fn bytes(base64: &Value) -> Vec<u8> {
    STANDARD.decode(base64.as_str().unwrap()).unwrap()
}

/// The picture that gRPC answers.
async fn of_grpc(up: &Up, seed: u64) -> Vec<u8> {
    let request = GenerateRequest {
        seed: Some(seed),
        ..cluster::request(BOAT)
    };
    cluster::generate(up, request).await.unwrap().image.png
}

/// Prefills that the AR stage has made.
async fn prefills(up: &Up) -> u64 {
    let text = web::get(&up.admin("ar-stage"), "/metrics").await.text;
    let counts = text.lines().filter(|line| {
        line.starts_with("omni_stage_step_duration_seconds_count") && line.contains("prefill")
    });
    let count = |line: &str| line.rsplit(' ').next().unwrap().parse::<f64>().unwrap() as u64;
    counts.map(count).sum()
}

#[tokio::test]
async fn four_images_share_one_prefill_and_are_those_that_grpc_makes_of_their_seeds() {
    let up = Up::start("shm");
    let before = prefills(&up).await;
    let body = with(wish(BOAT), json!({ "n": 4, "seed": 21 }));
    let answer = web::post_json(up.http(), IMAGES, &body).await;
    assert_eq!(answer.status, 200, "{}", answer.text);
    assert_eq!(prefills(&up).await, before + 1);
    let answer = answer.json();
    assert_conforms("ImagesResponse", &answer);
    let data = answer["data"].as_array().unwrap();
    assert_eq!(data.len(), 4);
    for (image, seed) in data.iter().zip(21..) {
        let same = bytes(&image["b64_json"]) == of_grpc(&up, seed).await;
        assert!(same, "the image of seed {seed} is another");
    }
    assert!(prefills(&up).await > before + 1, "prefills are counted");
    let omni = &answer["omni"];
    let seeds: Vec<_> = omni["images"]
        .as_array()
        .unwrap()
        .iter()
        .map(|image| &image["seed"])
        .collect();
    assert_eq!(seeds, [21, 22, 23, 24]);
    assert!(
        omni["transport"].as_str().unwrap().contains("shm"),
        "{omni}"
    );
    assert!(omni["transfer_bytes"].as_u64().unwrap() > 0);
    let members = up.members().await;
    for worker in omni["images"]
        .as_array()
        .unwrap()
        .iter()
        .map(|image| &image["worker"])
    {
        assert!(
            members.iter().any(|member| *worker == member.id.as_str()),
            "{worker}"
        );
    }
}

#[tokio::test]
async fn a_stream_tells_every_step_in_order_and_then_the_same_picture() {
    let up = Up::shared();
    let body = with(wish(BOAT), json!({ "stream": true, "steps": 5 }));
    let answer = web::post_json(up.http(), IMAGES, &body).await;
    assert_eq!(answer.headers["content-type"], "text/event-stream");
    let events = answer.events();
    for (name, data) in &events {
        assert_eq!(data["type"], name.as_str());
        assert_conforms("ImageEvent", data);
    }
    assert_eq!(events[0].0, "omni.accepted");
    let steps: Vec<_> = events
        .iter()
        .filter(|(name, _)| name == "omni.step")
        .map(|(_, data)| data["omni"]["step"].as_u64().unwrap())
        .collect();
    assert_eq!(steps, [1, 2, 3, 4, 5]);
    let (name, last) = events.last().unwrap();
    assert_eq!(name, "image_generation.completed");
    assert_conforms("Omni", &last["omni"]);
    let whole = with(wish(BOAT), json!({ "steps": 5 }));
    let whole = web::post_json(up.http(), IMAGES, &whole).await.json();
    assert_eq!(last["b64_json"], whole["data"][0]["b64_json"]);
}

#[tokio::test]
async fn a_decoded_preview_comes_before_the_picture_and_is_a_picture_of_its_size() {
    let up = Up::shared();
    let ask = json!({
        "stream": true, "steps": 4, "partial_images": 3, "preview_kind": "vae",
    });
    let answer = web::post_json(up.http(), IMAGES, &with(wish(BOAT), ask)).await;
    let events = answer.events();
    let previews: Vec<_> = events
        .iter()
        .filter(|(name, _)| name == "image_generation.partial_image")
        .collect();
    assert_eq!(previews.len(), 3, "{events:?}");
    for (number, (_, data)) in previews.iter().enumerate() {
        assert_eq!(data["partial_image_index"], number);
        assert_eq!(data["size"], "256x256");
    }
    let last = events.last().unwrap();
    assert_eq!(last.0, "image_generation.completed");
}

#[tokio::test]
async fn what_is_left_open_is_chosen_and_answered() {
    let up = Up::shared();
    let body = json!({ "prompt": BOAT, "size": "auto", "quality": "low", "user": "ann" });
    let answer = web::post_json(up.http(), IMAGES, &body).await.json();
    let omni = &answer["omni"];
    let model = web::get(up.http(), "/v1/models").await.json()["data"][0]["omni"].clone();
    let default = model["default_steps"].as_u64().unwrap();
    assert_eq!(omni["steps"], (default / 4).max(1));
    assert!(
        model["sizes"].as_array().unwrap().contains(&omni["size"]),
        "{omni}"
    );
    assert!(omni["seed"].as_u64().unwrap() <= base::limits::MAX_SEED);
    assert_eq!(omni["guidance"], model["default_guidance"]);
    let snapped = with(
        wish(BOAT),
        json!({ "size": "250x260", "size_policy": "snap" }),
    );
    let answer = web::post_json(up.http(), IMAGES, &snapped).await.json();
    assert_eq!(
        (&answer["size"], &answer["omni"]["size"]),
        (&json!("256x256"), &json!("256x256"))
    );
}

#[tokio::test]
async fn pictures_come_in_the_format_that_was_asked_for() {
    let up = Up::shared();
    let mut sizes = Vec::new();
    for (format, compression, magic) in [
        ("jpeg", 90, &b"\xff\xd8\xff"[..]),
        ("jpeg", 10, b"\xff\xd8\xff"),
        ("webp", 90, b"RIFF"),
        ("webp", 10, b"RIFF"),
        ("png", 100, b"\x89PNG"),
    ] {
        let more = json!({ "output_format": format, "output_compression": compression });
        let answer = web::post_json(up.http(), IMAGES, &with(wish(BOAT), more))
            .await
            .json();
        assert_eq!(answer["output_format"], format);
        let picture = bytes(&answer["data"][0]["b64_json"]);
        assert!(picture.starts_with(magic), "{format}");
        sizes.push(picture.len());
    }
    assert!(sizes[1] < sizes[0] && sizes[3] < sizes[2], "{sizes:?}");
}

#[tokio::test]
async fn a_form_is_as_good_as_json() {
    let up = Up::shared();
    let mut form = String::new();
    for (name, value) in [
        ("prompt", BOAT),
        ("size", "256x256"),
        ("steps", "2"),
        ("seed", "1"),
        ("guidance", "3"),
    ] {
        form += &format!(
            "--edge\r\nContent-Disposition: form-data; name=\"{name}\"\r\n\r\n{value}\r\n"
        );
    }
    form += "--edge--\r\n";
    let request = web::post(IMAGES, "multipart/form-data; boundary=edge", form);
    let answer = web::send(up.http(), request).await;
    assert_eq!(answer.status, 200, "{}", answer.text);
    assert!(bytes(&answer.json()["data"][0]["b64_json"]) == of_grpc(up, 1).await);
}

#[tokio::test]
async fn a_chat_answers_with_the_picture_of_its_user_message() {
    let up = Up::shared();
    let mut body = wish(BOAT);
    body.as_object_mut().unwrap().remove("prompt");
    body["messages"] = json!([{ "role": "user", "content": BOAT }]);
    let answer = web::post_json(up.http(), CHAT, &body).await.json();
    assert_conforms("ChatCompletion", &answer);
    let url = |message: &Value| {
        message["images"][0]["image_url"]["url"]
            .as_str()
            .map(str::to_owned)
    };
    let whole = url(&answer["choices"][0]["message"]).unwrap();
    let picture = whole.strip_prefix("data:image/png;base64,").unwrap();
    assert!(STANDARD.decode(picture).unwrap() == of_grpc(up, 1).await);

    let answer = web::post_json(up.http(), CHAT, &with(body, json!({ "stream": true }))).await;
    let mut events = answer.events();
    assert_eq!(events.pop().unwrap().1, "[DONE]");
    let chunks: Vec<_> = events.iter().map(|(_, chunk)| chunk).collect();
    for chunk in &chunks {
        assert_conforms("ChatCompletionChunk", chunk);
    }
    let streamed: Vec<_> = chunks
        .iter()
        .filter_map(|chunk| url(&chunk["choices"][0]["delta"]))
        .collect();
    assert_eq!(streamed, [whole]);
    assert_conforms("Omni", &chunks.last().unwrap()["omni"]);
}
