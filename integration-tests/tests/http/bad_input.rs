//! Bad requests: one status, type and param each, and the next request works.
use integration_tests::{cluster::Up, web};
use serde_json::{Value, json};

use crate::{CHAT, EDITS, IMAGES, conform::assert_conforms, wish, with};

/// A PNG of 2x2 pixels.
const PICTURE: &str = "data:image/png;base64,\
    iVBORw0KGgoAAAANSUhEUgAAAAIAAAACCAIAAAD91JpzAAAAEElEQVR4nGP4z8AARAwQCgAf7gP9i18U1AAAAABJRU5ErkJggg==";

const BAD: &str = "invalid_request_error";

async fn assert_refused(
    path: &str,
    body: &Value,
    (status, kind, param): (u16, &str, Option<&str>),
) {
    let up = Up::shared();
    let answer = web::post_json(up.http(), path, body).await;
    let shown: String = body.to_string().chars().take(200).collect();
    assert_eq!(answer.status, status, "{shown}: {}", answer.text);
    assert_conforms("ErrorResponse", &answer.json());
    let error = answer.error();
    assert_eq!(error["type"], kind, "{shown}: {error}");
    assert_eq!(error["param"].as_str(), param, "{shown}: {error}");
    let message = error["message"].as_str().unwrap();
    assert_eq!(message.lines().count(), 1, "{error}");
    assert!(message.len() < 600, "{error}");
    let id = answer.headers["x-request-id"].to_str().unwrap();
    assert!(!id.is_empty());
    let retried = answer.headers["x-should-retry"].to_str().unwrap();
    assert_eq!(retried, "false", "the same again helps nobody");
}

#[tokio::test]
async fn each_bad_field_of_an_image_is_named() {
    let long = "a".repeat(32_001);
    let tokens = "word and ".repeat(3_000);
    for (more, param) in [
        (json!({ "prompt": "" }), "prompt"),
        (json!({ "prompt": null }), "prompt"),
        (json!({ "prompt": 7 }), "prompt"),
        (json!({ "prompt": ["a fox"] }), "prompt"),
        (json!({ "prompt": long }), "prompt"),
        (json!({ "prompt": tokens }), "prompt"),
        (json!({ "size": "0x0" }), "size"),
        (json!({ "size": "255x257" }), "size"),
        (json!({ "size": "1024x" }), "size"),
        (json!({ "size": "100000x10000" }), "size"),
        (json!({ "size": "-256x256" }), "size"),
        (json!({ "size": 256 }), "size"),
        (json!({ "size_policy": "stretch" }), "size_policy"),
        (json!({ "n": 0 }), "n"),
        (json!({ "n": 11 }), "n"),
        (json!({ "n": -1 }), "n"),
        (json!({ "n": 1.5 }), "n"),
        (json!({ "n": "2" }), "n"),
        (json!({ "steps": 0 }), "steps"),
        (json!({ "steps": 201 }), "steps"),
        (json!({ "seed": -1 }), "seed"),
        (json!({ "seed": 9_223_372_036_854_775_808_u64 }), "seed"),
        (
            json!({ "seed": 9_223_372_036_854_775_807_u64, "n": 2 }),
            "seed",
        ),
        (json!({ "guidance": -0.5 }), "guidance"),
        (json!({ "guidance": 1e9 }), "guidance"),
        (json!({ "guidance": "3" }), "guidance"),
        (json!({ "deadline": 0 }), "deadline"),
        (json!({ "deadline": 3601 }), "deadline"),
        (json!({ "quality": "best" }), "quality"),
        (json!({ "quality": "low" }), "quality"),
        (json!({ "background": "transparent" }), "background"),
        (json!({ "output_format": "gif" }), "output_format"),
        (json!({ "output_compression": 101 }), "output_compression"),
        (json!({ "output_compression": 50 }), "output_compression"),
        (json!({ "response_format": "url" }), "response_format"),
        (json!({ "stream": "yes" }), "stream"),
        (json!({ "partial_images": 4 }), "partial_images"),
        (json!({ "template": "chat" }), "template"),
        (json!({ "moderation": "low" }), "moderation"),
        (json!({ "messages": [] }), "messages"),
    ] {
        assert_refused(IMAGES, &with(wish("a boat"), more), (400, BAD, Some(param))).await;
    }
    let missing = json!({ "size": "256x256" });
    assert_refused(IMAGES, &missing, (400, BAD, Some("prompt"))).await;
    let other = with(wish("a boat"), json!({ "model": "gpt-image-1" }));
    assert_refused(IMAGES, &other, (404, BAD, Some("model"))).await;
    let late = with(wish("a boat"), json!({ "deadline": 0.01, "steps": 200 }));
    assert_refused(IMAGES, &late, (400, BAD, Some("deadline"))).await;
    let unseen = with(wish("a boat"), json!({ "partial_images": 2 }));
    assert_refused(IMAGES, &unseen, (400, BAD, Some("partial_images"))).await;

    let answer = web::post_json(Up::shared().http(), IMAGES, &wish("a boat")).await;
    assert_eq!(answer.status, 200, "{}", answer.text);
}

#[tokio::test]
async fn bad_chats_are_named() {
    let user = json!({ "role": "user", "content": "a boat" });
    let chat = |more: Value| with(json!({ "messages": [user], "steps": 1 }), more);
    for (more, status, param) in [
        (json!({ "messages": [] }), 400, "messages"),
        (json!({ "messages": "a boat" }), 400, "messages"),
        (
            json!({ "messages": [{ "role": "user", "content": "" }] }),
            400,
            "messages",
        ),
        (json!({ "messages": [user, user] }), 501, "messages"),
        (json!({ "temperature": 1 }), 400, "temperature"),
        (json!({ "prompt": "x" }), 400, "prompt"),
        (json!({ "modalities": ["audio"] }), 400, "modalities"),
        (json!({ "modalities": [] }), 400, "modalities"),
        (json!({ "modalities": ["text"] }), 400, "steps"),
        (json!({ "mode": "chat" }), 400, "mode"),
        (
            json!({ "mode": "think", "max_tokens": 0 }),
            400,
            "max_tokens",
        ),
        (
            json!({ "system_prompt_name": "en_unified" }),
            400,
            "system_prompt_name",
        ),
        (
            json!({ "messages": [{ "role": "user", "content": [
                { "type": "text", "text": "a boat" },
                { "type": "image_url", "image_url": { "url": "data:image/png;base64,AAAA" } },
            ] }] }),
            400,
            "image",
        ),
        (json!({ "steps": 0 }), 400, "steps"),
    ] {
        let kind = if status == 501 { "server_error" } else { BAD };
        assert_refused(CHAT, &chat(more), (status, kind, Some(param))).await;
    }
}

#[tokio::test]
async fn bad_edits_are_named() {
    let edit = |more: Value| with(with(wish("bluer"), json!({ "image": PICTURE })), more);
    for (more, status, param) in [
        (json!({ "mask": PICTURE }), 501, "mask"),
        (
            json!({ "image": [PICTURE, PICTURE], "mask": PICTURE }),
            501,
            "mask",
        ),
        (
            json!({ "image": "https://images.example/a.png" }),
            400,
            "image",
        ),
        (json!({ "drop_think": true }), 400, "drop_think"),
        (json!({ "image": "http://localhost/a.png" }), 400, "image"),
        (
            json!({ "image": "data:image/png;base64,AAAA" }),
            400,
            "image",
        ),
        (
            json!({ "image": [PICTURE, PICTURE, PICTURE, PICTURE] }),
            400,
            "image",
        ),
        (json!({ "mask": [PICTURE, PICTURE] }), 400, "mask"),
        (json!({ "prompt": "" }), 400, "prompt"),
        (json!({ "size": "1x1" }), 400, "size"),
        (json!({ "input_fidelity": "high" }), 400, "input_fidelity"),
    ] {
        let kind = if status == 501 { "server_error" } else { BAD };
        assert_refused(EDITS, &edit(more), (status, kind, Some(param))).await;
    }
}

#[tokio::test]
async fn a_body_that_is_no_request_is_the_callers_fault() {
    let site = Up::shared().http();
    let huge = format!("{{\"prompt\": \"{}\"}}", "a".repeat(5 << 20));
    for (media, body, status) in [
        ("application/json", "{\"prompt\": ", 400),
        ("application/json", "[]", 400),
        (
            "application/json",
            "{\"prompt\": \"a\", \"prompt\": \"b\"}",
            400,
        ),
        ("text/plain", "{}", 415),
        ("application/json", huge.as_str(), 413),
    ] {
        let answer = web::send(site, web::post(IMAGES, media, body.to_owned())).await;
        assert_eq!(answer.status, status, "{}", answer.text);
        assert_conforms("ErrorResponse", &answer.json());
        assert_eq!(answer.error()["type"], BAD);
    }
    let wrong = web::get(site, IMAGES).await;
    assert_eq!(
        (
            wrong.status.as_u16(),
            wrong.headers["allow"].to_str().unwrap()
        ),
        (405, "POST")
    );
    assert_eq!(web::get(site, "/v1/files").await.status, 404);
}
