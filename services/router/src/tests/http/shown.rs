//! Pictures to draw from, and what is written before drawing.
use super::*;

const PICTURE: &str = "iVBORw0KGgoAAAANSUhEUgAAAAIAAAACCAIAAAD91JpzAAAAEElEQVR4nGP4z8AARAwQCgAf7gP9i18U1AAAAABJRU5ErkJggg==";

#[tokio::test]
async fn an_edit_is_checked_in_full_and_its_pictures_reach_the_stage() {
    let site = site(Script::new([])).await;
    let url = format!("data:image/png;base64,{PICTURE}");
    let wish = |more: Value| {
        let mut wish = wish_with(&more);
        if wish.get("image").is_none() {
            wish["image"] = json!(url);
        }
        wish
    };
    let edits = "/v1/images/edits";
    let (status, error) = site.refused(edits, wish(json!({ "mask": url }))).await;
    assert_eq!(
        (status, &error["param"]),
        (StatusCode::NOT_IMPLEMENTED, &json!("mask"))
    );
    for (more, param) in [
        (json!({ "image": "data:image/png;base64,AAAA" }), "image"),
        (json!({ "image": "http://localhost/x.png" }), "image"),
        (json!({ "image": [url, url, url, url] }), "image"),
        (json!({ "mask": "data:image/png;base64,AAAA" }), "mask"),
        (json!({ "steps": 201 }), "steps"),
        (json!({ "size": "63x63" }), "size"),
        (json!({ "model": "other" }), "model"),
        (json!({ "input_fidelity": "high" }), "input_fidelity"),
        (json!({ "temperature": 1 }), "temperature"),
        (json!({ "mode": "text" }), "mode"),
    ] {
        let (status, error) = site.refused(edits, wish(more.clone())).await;
        assert!(status.is_client_error(), "{more}: {status} {error}");
        assert_eq!(error["param"], param, "{more}: {error}");
    }
    assert_eq!(site.ar.calls(), 0);
    let both = wish(json!({ "image": [url, { "image_url": url }], "sampling_seed": 5 }));
    let response = site.post(edits, both).await;
    assert_eq!(response.status(), StatusCode::OK);
    let answer: Value = serde_json::from_str(&text(response).await).unwrap();
    // The stage said so; nobody asked for a size.
    assert_eq!(answer["size"], "128x32");
    let seen = site.ar.seen.lock().unwrap().clone().unwrap();
    assert_eq!(seen.images.len(), 2);
    assert!(seen.images[0].starts_with(b"\x89PNG") && seen.images[0] == seen.images[1]);
    assert_eq!(seen.size_from(), proto::v1::PrefillSize::FirstImage);
    assert_eq!((seen.seed, seen.width), (5, 0));
}

#[tokio::test]
async fn a_chat_may_show_pictures_and_may_ask_for_words_alone() {
    let site = site(Script::new([])).await;
    let part = json!({ "type": "image_url", "image_url": {
        "url": format!("data:image/png;base64,{PICTURE}"),
    } });
    let message = json!({ "role": "user", "content": [part, { "type": "text", "text": "what?" }] });
    let body = |more: &Value| {
        let mut body = json!({ "messages": [message], "modalities": ["text"] });
        body.as_object_mut()
            .unwrap()
            .extend(more.as_object().unwrap().clone());
        body
    };
    let chat = "/v1/chat/completions";
    for (more, param) in [
        (json!({ "size": "64x64" }), "size"),
        (json!({ "n": 2 }), "n"),
        (json!({ "steps": 3 }), "steps"),
        (json!({ "mode": "think" }), "mode"),
        (json!({ "output_format": "webp" }), "output_format"),
        (
            json!({ "max_tokens": 3, "max_completion_tokens": 3 }),
            "max_tokens",
        ),
        (json!({ "modalities": [] }), "modalities"),
    ] {
        let (status, error) = site.refused(chat, body(&more)).await;
        assert!(status.is_client_error(), "{more}: {status} {error}");
        assert_eq!(error["param"], param, "{more}: {error}");
    }
    assert_eq!(site.ar.calls(), 0);
    let response = site
        .post(chat, body(&json!({ "max_tokens": 7, "top_p": 0.5 })))
        .await;
    assert_eq!(response.status(), StatusCode::OK);
    let answer: Value = serde_json::from_str(&text(response).await).unwrap();
    let choice = &answer["choices"][0];
    assert_eq!(choice["message"]["content"], "a text");
    assert_eq!(choice["finish_reason"], "length");
    assert_eq!(answer["omni"]["mode"], "text");
    assert_eq!(site.dit.calls(), 0);
    let seen = site.ar.seen.lock().unwrap().clone().unwrap();
    assert_eq!(seen.task(), proto::v1::PrefillTask::Text);
    let sampling = seen.sampling.unwrap();
    assert_eq!(
        (sampling.max_new_tokens, sampling.top_p),
        (Some(7), Some(0.5))
    );
    assert!(!seen.negative_row && seen.images.len() == 1);
}

#[tokio::test]
async fn what_is_written_is_told_before_the_picture_and_n_images_share_it() {
    let site = site(Script::new([])).await;
    let wish = wish_with(&json!({
        "mode": "think_recaption", "size": "auto", "n": 2, "stream": true,
    }));
    let told = events(&text(site.post(IMAGES, wish).await).await);
    let names: Vec<_> = told.iter().map(|(name, _)| name.as_str()).collect();
    let place = |name: &str| names.iter().position(|told| *told == name).unwrap();
    assert!(place("omni.text") < place("omni.written"), "{names:?}");
    assert!(place("omni.written") < place("omni.step"), "{names:?}");
    let written = &told[place("omni.written")].1["omni"];
    assert_eq!(
        (&written["size"], &written["writing"]["text"]),
        (&json!("128x32"), &json!("a text"))
    );
    assert_eq!(told[place("omni.accepted")].1["omni"]["size"], "auto");
    let last = &told.last().unwrap().1;
    assert_eq!(
        (&last["size"], &last["omni"]["writing"]["cut"]),
        (&json!("128x32"), &json!(true))
    );
    assert_eq!((site.ar.calls(), site.dit.calls()), (1, 2));
}
