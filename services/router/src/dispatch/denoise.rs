//! The images of a request: side by side, each with its own worker, all on one prefix. Either every
//! image comes out or the request fails; the first failure drops the others' streams.
use std::{
    sync::atomic::{AtomicU32, Ordering},
    time::Instant,
};

use base::clock;
use base::limits::{CONTROL_DEADLINE, MAX_CHECKPOINT_BYTES, MAX_RESPONSE_BYTES};
use futures_util::future::try_join_all;
use proto::v1::{
    DenoiseCheckpoint, DenoiseDone, DenoiseImage, DenoisePreview, DenoiseRequest, DenoiseStarted,
    DenoiseStep, Image, PrefixRow, Preview, Queued, StepDone, Timings,
    denoise_response::Event as Denoised, dit_worker_service_client::DitWorkerServiceClient,
    generate_response::Event,
};
use registry::Role;
use tonic::{Status, Streaming};

use super::recovery::{Missing, Prefixes};
use super::{Lost, Prefix, Tries, Walk, protocol, stage_error};
use crate::{
    RouterError,
    jobs::JobHandle,
    members::{Assignment, drawing},
    placement::role_name,
    validate::policy_name,
};

/// Steps between two checkpoints: what a worker that dies costs at most.
const CHECKPOINT_EVERY: u32 = 4;

/// One image under way.
struct Canvas<'a> {
    /// 0 to n - 1.
    index: u32,
    prefix: &'a Prefix,
    /// The last step of every image.
    steps: &'a [AtomicU32],
    job: &'a JobHandle,
}

/// What the denoiser has told so far.
#[derive(Debug, Default)]
struct Progress {
    started: DenoiseStarted,
    /// The worker has its prefixes.
    fetched: bool,
    step: u32,
    image: bool,
    /// When the worker said that it had its prefixes.
    started_at: Option<Instant>,
    /// The worker could not get its prefixes.
    missing: Option<Missing>,
}

/// How far an image has come, over all workers that were at it.
#[derive(Debug, Default)]
struct Way {
    /// Where another worker may go on.
    checkpoint: Option<DenoiseCheckpoint>,
    /// Last step that the client was told of.
    told: u32,
    /// Previews that the client has, one bit each.
    previews: u32,
    /// The pull tokens of the last worker, and the slots that they are for.
    tokens: (Vec<u64>, Vec<Vec<u8>>),
}

impl Way {
    /// Steps that need not be done again.
    fn kept(&self) -> u32 {
        self.checkpoint
            .as_ref()
            .map_or(0, |checkpoint| checkpoint.step)
    }
}

/// What the denoiser told in all.
struct Ended {
    started: DenoiseStarted,
    started_at: Option<Instant>,
    done: DenoiseDone,
}

impl Walk {
    /// Makes every image; adds what that took to `timings`.
    pub(super) async fn denoise(
        &self,
        prefixes: &Prefixes,
        job: &JobHandle,
        timings: &mut Timings,
    ) -> Result<(), RouterError> {
        let steps: Vec<_> = (0..self.request.n).map(|_| AtomicU32::new(0)).collect();
        let image = |index| {
            let work = self.denoise_image(index, prefixes, (&steps, job));
            telemetry::trace::within(telemetry::hop!("image", index), work)
        };
        let images = (0..self.request.n).map(image);
        for Ended { started, done, .. } in try_join_all(images).await? {
            timings.transfer_ms = timings.transfer_ms.max(started.transfer_ms);
            timings.transfer_bytes += started.transfer_bytes;
            timings.denoise_ms = timings.denoise_ms.max(done.denoise_ms);
            timings.decode_ms = timings.decode_ms.max(done.decode_ms);
            if !timings
                .transport
                .split(',')
                .any(|name| name == started.transport)
            {
                let comma = if timings.transport.is_empty() {
                    ""
                } else {
                    ","
                };
                timings.transport += &format!("{comma}{}", started.transport);
            }
        }
        Ok(())
    }

    async fn denoise_image(
        &self,
        index: u32,
        prefixes: &Prefixes,
        (steps, job): (&[AtomicU32], &JobHandle),
    ) -> Result<Ended, RouterError> {
        let mut tries = Tries::new(Role::DitWorker, index);
        let alone = self.context.members.seconds_alone(&self.request);
        let mut way = Way::default();
        loop {
            let prefix = prefixes.current().await;
            let canvas = Canvas {
                index,
                prefix: &prefix,
                steps,
                job,
            };
            let picture = drawing(&self.request, self.request.tokens_of(prefix.size));
            tries.need = prefix.need(picture, alone);
            let assignment = self.assign(&mut tries).await?;
            let (told, from) = (way.told, clock::now());
            match self.denoise_once(&assignment, &canvas, &mut way).await {
                Ok(ended) => {
                    let told = (&ended.started, ended.started_at, &ended.done);
                    self.notes
                        .denoised(from, (canvas.index, &assignment.member_id), told);
                    return Ok(ended);
                }
                Err(lost) => {
                    self.lost(from, &tries, (&assignment, &lost.error));
                    let lost = Lost {
                        moved: way.told > told,
                        ..lost
                    };
                    if let Some(missing) = lost.missing
                        && self
                            .recover(prefixes, &prefix, (&lost.error, missing))
                            .await?
                    {
                        continue;
                    }
                    tries.again(lost, &assignment)?;
                    tries.from_step = way.kept();
                    tracing::info!(
                        request_id = %self.request.request_id, image = canvas.index,
                        from = way.kept(), "denoising goes on from its last checkpoint"
                    );
                }
            }
        }
    }

    async fn denoise_once(
        &self,
        assignment: &Assignment,
        canvas: &Canvas<'_>,
        way: &mut Way,
    ) -> Result<Ended, Lost> {
        let mut progress = Progress {
            step: way.kept(),
            ..Progress::default()
        };
        let mut client = DitWorkerServiceClient::new(assignment.channel.clone())
            .max_decoding_message_size(MAX_RESPONSE_BYTES);
        let rows = self.granted(assignment, canvas.prefix, way).await?;
        let request = self.denoise_request(assignment.epoch, (canvas, rows), way);
        let ended = async {
            let away = |status: Status| stage_error(Role::DitWorker, assignment, &status);
            let call = client.denoise(self.timed(request));
            let call = self.word(assignment, call);
            let mut stream = call.await.map_err(away)?.into_inner();
            loop {
                let message = tokio::select! {
                    message = self.word(assignment, stream.message()) => message.map_err(away)?,
                    // Once fetched, the worker needs the pool no more.
                    error = canvas.prefix.held.lost(), if !progress.fetched => {
                        progress.missing = Some(Missing::Gone);
                        return Err(error);
                    }
                };
                let Some(message) = message else {
                    return Err(protocol(Role::DitWorker, "ended without a result"));
                };
                let Some(event) = message.event else { continue };
                let event = self.follow(event, (&mut progress, way), canvas, assignment);
                if let Some(done) = event.await? {
                    let end = self.word(assignment, end_of(&mut stream));
                    // The result is whole: nothing that comes instead of the end takes it away.
                    let _ = tokio::time::timeout(CONTROL_DEADLINE, end).await;
                    return Ok(done);
                }
            }
        };
        let ended = ended.await;
        match ended {
            Ok(done) => Ok(Ended {
                started: progress.started,
                started_at: progress.started_at,
                done,
            }),
            Err(error) => Err(Lost {
                error: self.explained(error, progress.missing),
                // Steps that are done again are the same; an image that was told is not told twice.
                begun: progress.image,
                moved: false,
                missing: progress.missing,
            }),
        }
    }

    /// A worker's own words about a transfer, with the policy beside them.
    fn explained(&self, error: RouterError, missing: Option<Missing>) -> RouterError {
        match (missing, error) {
            (Some(_), RouterError::Stage(failure)) => RouterError::NotTransferred {
                failure,
                policy: policy_name(self.request.loss.policy),
            },
            (_, error) => error,
        }
    }

    /// The rows with a token each, with which this worker may pull them once.
    async fn granted(
        &self,
        assignment: &Assignment,
        prefix: &Prefix,
        way: &mut Way,
    ) -> Result<Vec<PrefixRow>, Lost> {
        let mut rows = prefix.done.rows.clone();
        let handles = rows.iter().filter_map(|row| row.prefix.as_ref());
        let slots: Vec<u64> = handles.map(|handle| handle.slot).collect();
        if way.tokens.0 != slots {
            way.tokens = (slots, Vec::new());
        }
        let receiver = (assignment.member_id.as_str(), assignment.epoch);
        let made = prefix.held.grant(receiver, &way.tokens.1).await;
        let tokens = made.map_err(|failure| {
            let missing = Missing::of(&failure);
            Lost {
                error: self.explained(RouterError::Stage(failure), missing),
                begun: false,
                moved: false,
                missing,
            }
        })?;
        way.tokens.1.clone_from(&tokens);
        for (handle, token) in rows
            .iter_mut()
            .filter_map(|row| row.prefix.as_mut())
            .zip(tokens)
        {
            handle.pull_token = token;
        }
        Ok(rows)
    }

    /// One event of the denoiser. `Some`: it was the last.
    async fn follow(
        &self,
        event: Denoised,
        (progress, way): (&mut Progress, &mut Way),
        canvas: &Canvas<'_>,
        assignment: &Assignment,
    ) -> Result<Option<DenoiseDone>, RouterError> {
        match event {
            Denoised::Queued(queued) => {
                let stage = role_name(Role::DitWorker).to_owned();
                self.send(Event::Queued(Queued {
                    ahead: queued.ahead,
                    stage,
                }))
                .await?;
            }
            Denoised::Started(started) => {
                progress.started = started;
                progress.fetched = true;
                canvas.prefix.fetched.store(true, Ordering::Release);
                progress.started_at = Some(clock::now());
            }
            Denoised::NoPrefix(told) => {
                let gone = told.gone;
                progress.missing = Some(if gone { Missing::Gone } else { Missing::Away });
            }
            Denoised::Step(step) => self.stepped(step, (progress, way), canvas).await?,
            Denoised::Preview(preview) if !progress.image => {
                self.previewed(preview, way, canvas).await?;
            }
            // It came too late to be one.
            Denoised::Preview(_) => {}
            Denoised::Image(image) => {
                self.check_image(&image, progress, canvas)?;
                progress.image = true;
                let DenoiseImage { width, height, png } = image;
                self.send(Event::Image(Image {
                    index: canvas.index,
                    width,
                    height,
                    png,
                    seed: self.request.seed_of(canvas.index),
                    worker: assignment.member_id.clone(),
                }))
                .await?;
            }
            Denoised::Done(_) if !progress.image => {
                return Err(protocol(Role::DitWorker, "finished without an image"));
            }
            Denoised::Done(done) => return Ok(Some(done)),
        }
        Ok(None)
    }

    async fn stepped(
        &self,
        step: DenoiseStep,
        (progress, way): (&mut Progress, &mut Way),
        canvas: &Canvas<'_>,
    ) -> Result<(), RouterError> {
        // A job that is handed over tells the step it stands at once more.
        if step.step < progress.step || step.step > self.request.steps {
            return Err(protocol(Role::DitWorker, "counted its steps wrongly"));
        }
        progress.step = step.step;
        if let Some(checkpoint) = step.checkpoint {
            let size = checkpoint.latents.len();
            if checkpoint.step != step.step || size > MAX_CHECKPOINT_BYTES {
                return Err(protocol(
                    Role::DitWorker,
                    "sent a checkpoint of another step",
                ));
            }
            way.checkpoint = Some(checkpoint);
        }
        if step.step <= way.told {
            return Ok(());
        }
        way.told = step.step;
        canvas.stepped(step.step);
        self.send(Event::Step(StepDone {
            step: step.step,
            steps: self.request.steps,
            index: canvas.index,
        }))
        .await
    }

    async fn previewed(
        &self,
        preview: DenoisePreview,
        way: &mut Way,
        canvas: &Canvas<'_>,
    ) -> Result<(), RouterError> {
        let asked = preview.index < self.request.previews;
        let (true, Some(image)) = (asked, preview.image) else {
            return Err(protocol(Role::DitWorker, "sent a preview nobody asked for"));
        };
        let bit = 1 << preview.index;
        if way.previews & bit != 0 {
            return Ok(());
        }
        way.previews |= bit;
        self.notes.previewed(&image.png);
        self.send(Event::Preview(Preview {
            index: canvas.index,
            number: preview.index,
            width: image.width,
            height: image.height,
            png: image.png,
        }))
        .await
    }

    fn denoise_request(
        &self,
        epoch: u64,
        (canvas, rows): (&Canvas<'_>, Vec<PrefixRow>),
        way: &Way,
    ) -> DenoiseRequest {
        let request = &self.request;
        DenoiseRequest {
            request_id: request.request_id.to_string(),
            epoch,
            weights_id: request.weights_id.clone(),
            rows,
            height: canvas.prefix.size.height,
            width: canvas.prefix.size.width,
            steps: request.steps,
            guidance: request.guidance,
            seed: request.seed_of(canvas.index),
            resume: way.checkpoint.clone(),
            checkpoint_every: CHECKPOINT_EVERY,
            previews: request.previews,
            preview_kind: request.preview_kind.into(),
            priority: request.priority.into(),
            output_height: canvas.prefix.done.output_height,
            output_width: canvas.prefix.done.output_width,
            age_ms: self.age_ms(),
            transfer_timeout_ms: request.loss.transfer_timeout_ms,
        }
    }

    fn check_image(
        &self,
        image: &DenoiseImage,
        progress: &Progress,
        canvas: &Canvas<'_>,
    ) -> Result<(), RouterError> {
        let size = canvas.prefix.output;
        if progress.image {
            return Err(protocol(Role::DitWorker, "sent a second image"));
        }
        if (image.width, image.height) != (size.width, size.height) || image.png.is_empty() {
            return Err(protocol(Role::DitWorker, "made an image of another size"));
        }
        Ok(())
    }
}

impl Canvas<'_> {
    /// The request stands where the image stands that is furthest behind.
    fn stepped(&self, step: u32) {
        self.steps[self.index as usize].store(step, Ordering::Relaxed);
        let behind = self.steps.iter().map(|step| step.load(Ordering::Relaxed));
        self.job.set_step(behind.min().unwrap_or(step));
    }
}

/// Reads a stream to its end: one that is dropped before is reset, and a connection bears only so many resets that cross
/// with what was still under way.
async fn end_of<T>(stream: &mut Streaming<T>) -> Result<(), Status> {
    while stream.message().await?.is_some() {}
    Ok(())
}
