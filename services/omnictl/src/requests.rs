//! Commands on one request: where it stands, stop it.
use base::{Code, Failure, limits::CONTROL_DEADLINE};
use proto::v1::{
    CancelRequest, GetRequest, GetResponse, get_response::State,
    image_service_client::ImageServiceClient,
};
use serde::Serialize;
use tonic::transport::Channel;

use crate::{args::Output, error::CliError, secure::keyed, text::Console};

/// Stops a request.
pub(crate) async fn cancel(endpoint: &str, id: String, console: &Console) -> Result<(), CliError> {
    let mut client = connect(endpoint).await?;
    if send_cancel(&mut client, id.clone()).await? {
        console.line(format!("{id} cancelled"))
    } else {
        console.line(format!("{id} had already ended"))
    }
}

/// Sends the cancel call; true when the request was still alive.
pub(crate) async fn send_cancel(
    client: &mut ImageServiceClient<Channel>,
    id: String,
) -> Result<bool, CliError> {
    let mut request = tonic::Request::new(CancelRequest { request_id: id });
    request.set_timeout(CONTROL_DEADLINE);
    Ok(client.cancel(keyed(request)).await?.into_inner().cancelled)
}

/// Shows where a request stands.
pub(crate) async fn show(
    endpoint: &str,
    id: String,
    output: Output,
    console: &Console,
) -> Result<(), CliError> {
    let mut client = connect(endpoint).await?;
    let mut request = tonic::Request::new(GetRequest {
        request_id: id.clone(),
    });
    request.set_timeout(CONTROL_DEADLINE);
    let view = RequestView::new(id, client.get(keyed(request)).await?.into_inner());
    match output {
        Output::Json => console.json(&view),
        Output::Table => console.line(view.text()),
    }
}

async fn connect(endpoint: &str) -> Result<ImageServiceClient<Channel>, Failure> {
    Ok(ImageServiceClient::new(
        proto::channel::connect(endpoint).await?,
    ))
}

/// A request as it is printed.
#[derive(Debug, Serialize)]
struct RequestView {
    id: String,
    state: String,
    step: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    effective: Option<Effective>,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    code: Option<&'static str>,
}

/// What is really run.
#[derive(Debug, Serialize)]
struct Effective {
    model: String,
    width: u32,
    height: u32,
    steps: u32,
    seed: u64,
    guidance: f64,
}

impl RequestView {
    fn new(id: String, answer: GetResponse) -> Self {
        let state = answer.state();
        let failed = state == State::Failed;
        Self {
            id,
            state: state
                .as_str_name()
                .trim_start_matches("STATE_")
                .to_ascii_lowercase(),
            step: answer.step,
            effective: answer.accepted.map(|accepted| Effective {
                model: accepted.model,
                width: accepted.width,
                height: accepted.height,
                steps: accepted.steps,
                seed: accepted.seed,
                guidance: accepted.guidance,
            }),
            error: failed.then_some(answer.error),
            code: failed.then(|| {
                Code::from_number(answer.code)
                    .unwrap_or(Code::Unknown)
                    .name()
            }),
        }
    }

    fn text(&self) -> String {
        let mut text = format!("{} {}", self.id, self.state);
        if let Some(run) = &self.effective {
            text += &format!(
                "  step {}/{}  {}x{}  seed {}  guidance {}",
                self.step, run.steps, run.width, run.height, run.seed, run.guidance
            );
        }
        if let (Some(error), Some(code)) = (&self.error, self.code) {
            text += &format!("  {error} ({code})");
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use proto::v1::Accepted;

    use super::*;

    #[test]
    fn a_failed_request_shows_its_code_and_error() {
        let answer = GetResponse {
            state: State::Failed.into(),
            accepted: None,
            step: 3,
            error: "worker left".to_owned(),
            code: 14,
        };
        let text = RequestView::new("r1".to_owned(), answer).text();
        assert_eq!(text, "r1 failed  worker left (UNAVAILABLE)");
    }

    #[test]
    fn a_running_request_shows_its_step_and_size() {
        let accepted = Accepted {
            width: 256,
            height: 192,
            seed: 7,
            steps: 8,
            guidance: 5.0,
            ..Default::default()
        };
        let answer = GetResponse {
            state: State::Denoise.into(),
            accepted: Some(accepted),
            step: 3,
            ..Default::default()
        };
        let text = RequestView::new("r1".to_owned(), answer).text();
        assert_eq!(text, "r1 denoise  step 3/8  256x192  seed 7  guidance 5");
    }
}
