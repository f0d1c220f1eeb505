//! The images of a request: side by side, each with its own worker, all on one prefix. Either every
//! image comes out or the request fails; the first failure drops the others' streams.
use std::sync::atomic::{AtomicU32, Ordering};

use base::limits::MAX_RESPONSE_BYTES;
use futures_util::future::try_join_all;
use proto::v1::{
    DenoiseDone, DenoiseImage, DenoiseRequest, DenoiseStarted, Image, PrefixRow, Queued, StepDone,
    Timings, denoise_response::Event as Denoised,
    dit_worker_service_client::DitWorkerServiceClient, generate_response::Event,
};
use registry::Role;
use tonic::Status;

use super::{Lost, Prefix, Tries, Walk, protocol, stage_error};
use crate::{RouterError, jobs::JobHandle, members::Assignment, placement::role_name};

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
    begun: bool,
}

/// What the denoiser told in all.
struct Ended {
    started: DenoiseStarted,
    done: DenoiseDone,
}

impl Walk {
    /// Makes every image; adds what that took to `timings`.
    pub(super) async fn denoise(
        &self,
        prefix: &Prefix,
        job: &JobHandle,
        timings: &mut Timings,
    ) -> Result<(), RouterError> {
        let steps: Vec<_> = (0..self.request.n).map(|_| AtomicU32::new(0)).collect();
        let canvas = |index| Canvas {
            index,
            prefix,
            steps: &steps,
            job,
        };
        let images = (0..self.request.n).map(|index| self.denoise_image(canvas(index)));
        for Ended { started, done } in try_join_all(images).await? {
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

    async fn denoise_image(&self, canvas: Canvas<'_>) -> Result<Ended, RouterError> {
        let mut tries = Tries::new(Role::DitWorker);
        loop {
            let assignment = self.assign(&mut tries).await?;
            match self.denoise_once(&assignment, &canvas).await {
                Ok(ended) => return Ok(ended),
                Err(lost) => tries.again(lost, &assignment)?,
            }
        }
    }

    async fn denoise_once(
        &self,
        assignment: &Assignment,
        canvas: &Canvas<'_>,
    ) -> Result<Ended, Lost> {
        let mut progress = Progress::default();
        let lost = |status: &Status, begun| Lost {
            error: stage_error(Role::DitWorker, assignment, status),
            begun,
        };
        let mut client = DitWorkerServiceClient::new(assignment.channel.clone())
            .max_decoding_message_size(MAX_RESPONSE_BYTES);
        let request = self.denoise_request(assignment.epoch, canvas);
        let call = client.denoise(self.timed(request));
        let mut stream = call
            .await
            .map_err(|status| lost(&status, false))?
            .into_inner();
        loop {
            let message = tokio::select! {
                message = stream.message() => {
                    message.map_err(|status| lost(&status, progress.begun))?
                }
                // Once fetched, the worker needs the pool no more.
                error = canvas.prefix.held.lost(), if !progress.fetched => {
                    return Err(Lost { error, begun: progress.begun });
                }
            };
            let Some(message) = message else {
                let error = protocol(Role::DitWorker, "ended without a result");
                return Err(Lost {
                    error,
                    begun: progress.begun,
                });
            };
            let Some(event) = message.event else { continue };
            let step = self.follow(event, &mut progress, canvas, assignment).await;
            match step {
                Ok(None) => {}
                Ok(Some(done)) => {
                    return Ok(Ended {
                        started: progress.started,
                        done,
                    });
                }
                Err(error) => {
                    return Err(Lost {
                        error,
                        begun: progress.begun,
                    });
                }
            }
        }
    }

    /// One event of the denoiser. `Some`: it was the last.
    async fn follow(
        &self,
        event: Denoised,
        progress: &mut Progress,
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
            }
            Denoised::Step(step) => {
                progress.begun = true;
                if step.step != progress.step + 1 || step.step > self.request.steps {
                    return Err(protocol(Role::DitWorker, "counted its steps wrongly"));
                }
                progress.step = step.step;
                canvas.stepped(step.step);
                self.send(Event::Step(StepDone {
                    step: step.step,
                    steps: self.request.steps,
                    index: canvas.index,
                }))
                .await?;
            }
            Denoised::Image(image) => {
                progress.begun = true;
                self.check_image(&image, progress)?;
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

    fn denoise_request(&self, epoch: u64, canvas: &Canvas<'_>) -> DenoiseRequest {
        let request = &self.request;
        let rows: &[PrefixRow] = &canvas.prefix.done.rows;
        DenoiseRequest {
            request_id: request.request_id.to_string(),
            epoch,
            weights_id: request.weights_id.clone(),
            rows: rows.to_vec(),
            height: request.size.height,
            width: request.size.width,
            steps: request.steps,
            guidance: request.guidance,
            seed: request.seed_of(canvas.index),
        }
    }

    fn check_image(&self, image: &DenoiseImage, progress: &Progress) -> Result<(), RouterError> {
        let size = self.request.size;
        if progress.image || progress.step != self.request.steps {
            return Err(protocol(Role::DitWorker, "sent an image at the wrong time"));
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
