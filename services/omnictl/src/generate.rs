//! `omnictl generate`: sends the request, follows its events, writes the picture.
use std::{str::FromStr as _, time::Duration};

use base::{
    Code, Failure, RequestId,
    limits::{DEFAULT_REQUEST_DEADLINE, MAX_EDIT_BYTES, MAX_RESPONSE_BYTES},
};
use proto::v1::{
    Accepted, Done, GenerateRequest, GenerateResponse, Image, InputImage, Mode, SizePolicy,
    Timings, generate_response::Event, image_service_client::ImageServiceClient,
    input_image::Source,
};
use serde_json::{Value, json};
use tonic::{Streaming, transport::Channel};

use crate::{
    args::GenerateArgs, error::CliError, output::PendingFile, progress::Progress, requests,
    secure::keyed, text::Console,
};

/// What the server gets past the deadline to say so itself.
const ANSWER_SLACK: Duration = Duration::from_secs(2);

/// Runs the command.
pub(crate) async fn run(
    endpoint: &str,
    args: &GenerateArgs,
    console: &Console,
) -> Result<(), CliError> {
    let id = request_id(args)?;
    let images = read_images(args)?;
    let file = PendingFile::open(&args.output, id.as_str())?;
    let mut run = Run {
        args,
        console,
        progress: Progress::new(!args.quiet && !args.json, console),
        file: Some(file),
        accepted: None,
        done: false,
    };
    run.progress.phase(format!("connecting to {endpoint}"));
    let mut client = ImageServiceClient::new(proto::channel::connect(endpoint).await?)
        .max_decoding_message_size(MAX_RESPONSE_BYTES);
    let outcome = {
        // Pinned out here, the stream outlives the select: the server hears the cancellation as such,
        // and not as a client that went away.
        let mut follow = std::pin::pin!(run.follow(client.clone(), &id, images));
        tokio::select! {
            outcome = &mut follow => outcome,
            _ = tokio::signal::ctrl_c() => Err(interrupted(&mut client, &id).await),
            () = tokio::time::sleep(deadline(args) + ANSWER_SLACK) => {
                // Whether or not the server hears it, this side stops waiting.
                let _ = requests::send_cancel(&mut client, id.to_string()).await;
                Err(Failure::new(Code::DeadlineExceeded, "no picture within the deadline").into())
            }
        }
    };
    run.progress.clear();
    outcome
}

/// Chosen here when the user did not, so that Ctrl-C can name it before the server has answered.
fn request_id(args: &GenerateArgs) -> Result<RequestId, CliError> {
    match &args.request_id {
        None => Ok(RequestId::generate()),
        Some(text) => RequestId::from_str(text)
            .map_err(|error| Failure::invalid("request_id", error.to_string()).into()),
    }
}

async fn interrupted(client: &mut ImageServiceClient<Channel>, id: &RequestId) -> CliError {
    CliError::Interrupted(match requests::send_cancel(client, id.to_string()).await {
        Ok(true) => "the request is cancelled",
        Ok(false) => "the request had already ended",
        Err(_) => "the server did not confirm the cancellation",
    })
}

/// The files of the pictures to show.
fn read_images(args: &GenerateArgs) -> Result<Vec<Vec<u8>>, CliError> {
    let read = |path: &std::path::PathBuf| {
        let refused = |why: String| Failure::invalid("image", format!("{}: {why}", path.display()));
        let size = std::fs::metadata(path)
            .map_err(|error| refused(error.to_string()))?
            .len();
        if size > MAX_EDIT_BYTES as u64 {
            return Err(refused(format!("has {size} bytes, more than {MAX_EDIT_BYTES}")).into());
        }
        std::fs::read(path).map_err(|error| refused(error.to_string()).into())
    };
    args.image.iter().map(read).collect()
}

fn request(
    args: &GenerateArgs,
    id: &RequestId,
    images: Vec<Vec<u8>>,
) -> tonic::Request<GenerateRequest> {
    let images = images.into_iter().map(|bytes| InputImage {
        source: Some(Source::Data(bytes)),
    });
    let mut request = tonic::Request::new(GenerateRequest {
        mode: args.mode.map_or(Mode::Unspecified, Into::into).into(),
        images: images.collect(),
        request_id: id.to_string(),
        model: args.model.clone(),
        prompt: args.prompt.clone(),
        size: args.size.clone(),
        size_policy: SizePolicy::from(args.size_policy).into(),
        steps: args.steps,
        seed: args.seed,
        guidance: args.guidance,
        template: args.template.clone(),
        system_prompt: args.system_prompt.clone(),
        n: 1,
        ..GenerateRequest::default()
    });
    request.set_timeout(deadline(args));
    request
}

fn deadline(args: &GenerateArgs) -> Duration {
    args.timeout.map_or(DEFAULT_REQUEST_DEADLINE, |seconds| {
        Duration::from_secs(u64::from(seconds))
    })
}

/// One request in flight.
struct Run<'a> {
    args: &'a GenerateArgs,
    console: &'a Console,
    progress: Progress,
    /// Taken when the picture is written.
    file: Option<PendingFile>,
    accepted: Option<Accepted>,
    done: bool,
}

impl Run<'_> {
    async fn follow(
        &mut self,
        mut client: ImageServiceClient<Channel>,
        id: &RequestId,
        images: Vec<Vec<u8>>,
    ) -> Result<(), CliError> {
        let mut stream: Streaming<GenerateResponse> = client
            .generate(keyed(request(self.args, id, images)))
            .await?
            .into_inner();
        while let Some(message) = stream.message().await? {
            // An event of a newer server is no reason to lose the picture.
            if let Some(event) = message.event {
                self.on_event(event)?;
            }
        }
        if self.done && self.file.is_none() {
            return Ok(());
        }
        Err(Failure::new(
            Code::Internal,
            "the stream ended before the picture was complete",
        )
        .into())
    }

    fn on_event(&mut self, event: Event) -> Result<(), CliError> {
        if self.args.json {
            self.console.json(&event_json(&event, self.args))?;
        }
        match event {
            Event::Accepted(accepted) => {
                self.progress.phase("reading the prompt".to_owned());
                self.accepted = Some(accepted);
            }
            Event::Queued(queued) => {
                self.progress
                    .phase(format!("{} ahead in {}", queued.ahead, queued.stage));
            }
            Event::Text(text) => self.progress.phase(text.text),
            Event::Written(written) => {
                if let Some(accepted) = &mut self.accepted {
                    (accepted.width, accepted.height) = (written.width, written.height);
                }
            }
            Event::Step(step) => self.progress.step(step.step, step.steps),
            Event::Image(image) => self.write(&image)?,
            // None was asked for.
            Event::Preview(_) => {}
            Event::Done(done) => self.finish(&done)?,
        }
        Ok(())
    }

    fn write(&mut self, image: &Image) -> Result<(), CliError> {
        match self.file.take() {
            Some(file) => file.commit(&image.png),
            None => Err(Failure::new(Code::Internal, "the server sent a second picture").into()),
        }
    }

    fn finish(&mut self, done: &Done) -> Result<(), CliError> {
        self.done = true;
        self.progress.clear();
        if self.args.json || self.args.quiet {
            return Ok(());
        }
        if let Some(accepted) = &self.accepted {
            self.console.line(format!(
                "{}  {}",
                self.args.output.display(),
                effective(accepted)
            ))?;
        }
        match &done.timings {
            Some(timings) => self.console.line(times(timings)),
            None => Ok(()),
        }
    }
}

/// "256x192  seed 7  8 steps  guidance 5".
fn effective(accepted: &Accepted) -> String {
    let Accepted {
        width,
        height,
        seed,
        steps,
        guidance,
        ..
    } = accepted;
    format!("{width}x{height}  seed {seed}  {steps} steps  guidance {guidance}")
}

fn times(t: &Timings) -> String {
    format!(
        "queue {:.0} ms, prefill {:.0} ms, transfer {:.1} ms ({} bytes over {}), \
         denoise {:.0} ms, decode {:.0} ms, total {:.0} ms",
        t.queue_ms,
        t.prefill_ms,
        t.transfer_ms,
        t.transfer_bytes,
        t.transport,
        t.denoise_ms,
        t.decode_ms,
        t.total_ms
    )
}

/// One event as one JSON object; the picture itself is in the file, not in the stream.
fn event_json(event: &Event, args: &GenerateArgs) -> Value {
    match event {
        Event::Accepted(a) => json!({
            "event": "accepted", "request_id": a.request_id, "model": a.model, "width": a.width,
            "height": a.height, "seed": a.seed, "steps": a.steps, "guidance": a.guidance,
            "cost": a.cost,
        }),
        Event::Queued(q) => json!({"event": "queued", "ahead": q.ahead, "stage": q.stage}),
        Event::Text(t) => json!({"event": "text", "text": t.text}),
        Event::Written(w) => json!({
            "event": "written", "text": w.text, "tokens": w.tokens, "cut": w.cut,
            "width": w.width, "height": w.height, "size_fallback": w.size_fallback,
        }),
        Event::Step(s) => json!({"event": "step", "step": s.step, "steps": s.steps}),
        Event::Image(i) => json!({
            "event": "image", "index": i.index, "width": i.width, "height": i.height,
            "bytes": i.png.len(), "path": args.output,
        }),
        Event::Preview(p) => json!({"event": "preview", "index": p.index}),
        Event::Done(d) => json!({"event": "done", "timings": d.timings.as_ref().map(times_json)}),
    }
}

fn times_json(t: &Timings) -> Value {
    json!({
        "queue_ms": t.queue_ms, "prefill_ms": t.prefill_ms, "transfer_ms": t.transfer_ms,
        "denoise_ms": t.denoise_ms, "decode_ms": t.decode_ms, "total_ms": t.total_ms,
        "transport": t.transport, "transfer_bytes": t.transfer_bytes,
    })
}
