//! Pictures in requests: the bytes of a form, and URLs in JSON. What they hold is checked where every door
//! is, in [`crate::validate`].
use base64::{Engine as _, engine::general_purpose::STANDARD};
use proto::v1::input_image::Source;
use serde_json::Value;

use super::schema::Raw;

/// The pictures in one value: a part of a form, or URLs in JSON, as a string, an object with `image_url`, or
/// a list of either.
///
/// # Errors
/// Why it is no picture.
pub(super) fn sent(raw: Raw) -> Result<Vec<Source>, String> {
    let json = match raw {
        Raw::Part(bytes) => return Ok(vec![Source::Data(bytes.into())]),
        Raw::Json(Value::Array(list)) => list,
        Raw::Json(one) => vec![one],
    };
    json.iter().map(of_json).collect()
}

fn of_json(value: &Value) -> Result<Source, String> {
    let url = match value {
        Value::String(text) => Some(text.as_str()),
        Value::Object(object) if object.len() == 1 => {
            object.get("image_url").and_then(Value::as_str)
        }
        _ => None,
    };
    url.ok_or_else(|| "must be a URL, or an object whose only key is image_url".to_owned())
        .and_then(of_url)
}

/// What a URL says: the bytes themselves, or where they are.
///
/// # Errors
/// Neither data of a picture nor an address.
pub(super) fn of_url(url: &str) -> Result<Source, String> {
    if url.starts_with("http://") || url.starts_with("https://") {
        return Ok(Source::Url(url.to_owned()));
    }
    let data = url
        .strip_prefix("data:image/")
        .and_then(|rest| rest.split_once(";base64,"))
        .ok_or("must be a URL that starts with data:image/TYPE;base64, or with http")?;
    let bytes = STANDARD.decode(data.1);
    bytes
        .map(Source::Data)
        .map_err(|error| format!("is no base64: {error}"))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_picture_in_json_is_data_or_an_address() {
        let url = format!("data:image/png;base64,{}", STANDARD.encode(b"bytes"));
        for json in [json!(url), json!({"image_url": url}), json!([url])] {
            let sent = sent(Raw::Json(json)).unwrap();
            assert!(sent == [Source::Data(b"bytes".to_vec())]);
        }
        let address = "https://images.example/a.png";
        let named = sent(Raw::Json(json!([address]))).unwrap();
        assert!(named == [Source::Url(address.to_owned())]);
        for json in [
            json!("ftp://localhost/a.png"),
            json!("data:text/html;base64,AA=="),
            json!("data:image/png;base64,@@"),
            json!({"image_url": url, "file_id": "x"}),
            json!(7),
        ] {
            assert!(sent(Raw::Json(json.clone())).is_err(), "{json}");
        }
    }
}
