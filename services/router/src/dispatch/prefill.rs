//! The first phase: the prompt, and pictures to draw from, become prefixes at an AR stage.
use std::sync::atomic::AtomicBool;

use base::{clock, limits::MAX_SIDE_PIXELS};
use proto::{
    size::Size,
    v1::{
        Mode, PrefillDone, PrefillRequest, PrefillResponse, PrefillSampling, PrefillSize,
        PrefillTask, PrefixRow, TextDelta, Written, ar_stage_service_client::ArStageServiceClient,
        generate_response::Event, prefill_response::Event as Prefilled, prefix_row::Kind,
    },
};
use registry::Role;
use tonic::Status;

use super::{Lost, Tries, Walk, lost_here, offer::Rest, protocol, stage_error};
use crate::{
    RouterError,
    directory::{Drawing, Need, host_of},
    members::Assignment,
    prefix::Held,
    validate::OpenSize,
};

/// What a stage has told of its prefixes; with its stream, and whether the client has seen a text of it, when they
/// are only offered.
type Answered = (
    PrefillDone,
    Held,
    Option<(tonic::Streaming<PrefillResponse>, bool)>,
);

/// What the AR stage has published for a request: one prefix for all of its images.
#[derive(Debug)]
pub(super) struct Prefix {
    pub(super) done: PrefillDone,
    pub(super) held: Held,
    /// Tokens that were read.
    pub(super) tokens: u32,
    /// Of the picture as it is denoised, one of the model's.
    pub(super) size: Size,
    /// Of the picture that comes out.
    pub(super) output: Size,
    /// Member that computed it.
    pub(super) stage: String,
    /// A worker has it, so all of it was there.
    pub(super) fetched: AtomicBool,
}

impl Walk {
    /// Computes the prefixes, or has them offered with what is left to do; `told`: the client hears what is
    /// written.
    pub(super) async fn prefill(
        &self,
        tries: &mut Tries,
        told: bool,
    ) -> Result<(Prefix, Option<Rest>), RouterError> {
        let images = self
            .notes
            .fetching(self.context.fetcher.files(&self.request.images));
        let images = images.await?;
        loop {
            let assignment = self.assign(tries).await?;
            let from = clock::now();
            match self.prefill_once(&assignment, &images, told).await {
                Ok((done, held, more)) => {
                    if more.is_none() {
                        self.notes.prefilled(from, &assignment.member_id, &done);
                    }
                    let cond = done.rows.first().and_then(|row| row.prefix.as_ref());
                    let prefix = Prefix {
                        tokens: cond.map_or(done.prompt_tokens, |prefix| prefix.tokens),
                        size: self.size_of(&done)?,
                        output: self.output_of(&done)?,
                        stage: assignment.member_id.clone(),
                        fetched: AtomicBool::new(false),
                        done,
                        held,
                    };
                    let rest = more.map(|(stream, begun)| Rest {
                        stream,
                        assignment,
                        from,
                        begun,
                        offered: prefix.done.rows.clone(),
                    });
                    return Ok((prefix, rest));
                }
                Err(lost) => {
                    self.lost(from, tries, (&assignment, &lost.error));
                    tries.again(lost, &assignment)?;
                }
            }
        }
    }

    /// The size of the picture: the request's, or what the stage has found.
    fn size_of(&self, done: &PrefillDone) -> Result<Size, RouterError> {
        let request = &self.request;
        if request.open_size.is_none() || request.mode == Mode::Text {
            return Ok(request.size);
        }
        let (width, height) = (done.width, done.height);
        if width == 0 || height == 0 || width.max(height) > MAX_SIDE_PIXELS {
            return Err(protocol(Role::ArStage, "named no size"));
        }
        Ok(Size { width, height })
    }

    /// The size of the picture that comes out.
    fn output_of(&self, done: &PrefillDone) -> Result<Size, RouterError> {
        match (done.output_width, done.output_height) {
            (0, 0) => self.size_of(done),
            _ if !self.request.align_image_size => Err(protocol(
                Role::ArStage,
                "scales an image that stays as it is",
            )),
            (width, height) if width.max(height) > MAX_SIDE_PIXELS || width.min(height) == 0 => {
                Err(protocol(Role::ArStage, "named no size to scale to"))
            }
            (width, height) => Ok(Size { width, height }),
        }
    }

    async fn prefill_once(
        &self,
        assignment: &Assignment,
        images: &[Vec<u8>],
        told: bool,
    ) -> Result<Answered, Lost> {
        let mut begun = false;
        let lost = |status: &Status, begun| Lost {
            error: stage_error(Role::ArStage, assignment, status),
            begun,
            moved: false,
            missing: None,
        };
        let mut client = ArStageServiceClient::new(assignment.channel.clone());
        let call = client.prefill(self.timed(self.prefill_request(assignment.epoch, images)));
        let mut stream = self
            .word(assignment, call)
            .await
            .map_err(|status| lost(&status, false))?
            .into_inner();
        while let Some(message) = self
            .word(assignment, stream.message())
            .await
            .map_err(|status| lost(&status, begun))?
        {
            match message.event {
                Some(Prefilled::Text(_)) if !told => {}
                Some(Prefilled::Text(text)) => {
                    begun = true;
                    let delta = Event::Text(TextDelta { text: text.text });
                    self.send(delta)
                        .await
                        .map_err(|error| lost_here(error, begun))?;
                }
                Some(Prefilled::Done(mut done)) => {
                    let held = self.take_rows(&mut done.rows);
                    let held = held.map_err(|error| lost_here(error, begun))?;
                    // The stage releases the leases unless its stream is read to the end.
                    while self
                        .word(assignment, stream.message())
                        .await
                        .map_err(|status| lost(&status, begun))?
                        .is_some()
                    {}
                    return Ok((done, held, None));
                }
                Some(Prefilled::Offered(mut done)) => {
                    let held = self.take_rows(&mut done.rows);
                    let held = held.map_err(|error| lost_here(error, begun))?;
                    return Ok((done, held, Some((stream, begun))));
                }
                // A newer stage may say more than this router understands.
                None => {}
            }
        }
        Err(lost_here(
            protocol(Role::ArStage, "ended without a result"),
            begun,
        ))
    }

    fn prefill_request(&self, epoch: u64, images: &[Vec<u8>]) -> PrefillRequest {
        let request = &self.request;
        let (size_from, size) = match request.open_size {
            _ if request.mode == Mode::Text => (PrefillSize::Unspecified, None),
            Some(OpenSize::Model) => (PrefillSize::Model, None),
            Some(OpenSize::FirstImage) => (PrefillSize::FirstImage, None),
            None => (PrefillSize::Unspecified, Some(request.size)),
        };
        let task = match request.mode {
            Mode::Unspecified | Mode::Image => PrefillTask::Unspecified,
            Mode::Think => PrefillTask::Think,
            Mode::Recaption => PrefillTask::Recaption,
            Mode::ThinkRecaption => PrefillTask::ThinkRecaption,
            Mode::Text => PrefillTask::Text,
        };
        let sampling = &request.sampling;
        PrefillRequest {
            request_id: request.request_id.to_string(),
            tenant: self.tenant.clone(),
            epoch,
            weights_id: request.weights_id.clone(),
            prompt: request.prompt.clone(),
            system_prompt: request.system_prompt.clone(),
            template: request.template.clone(),
            height: size.map_or(0, |size| size.height),
            width: size.map_or(0, |size| size.width),
            negative_row: request.rows > 1,
            task: task.into(),
            size_from: size_from.into(),
            images: images.to_vec(),
            sampling: Some(PrefillSampling {
                temperature: sampling.temperature,
                top_k: sampling.top_k,
                top_p: sampling.top_p,
                repetition_penalty: sampling.repetition_penalty,
                max_new_tokens: sampling.max_new_tokens,
            }),
            seed: request.prefix_seed(),
            drop_think: request.drop_think,
            system_prompt_name: request.system_prompt_name.clone(),
            align_image_size: request.align_image_size,
            transfer_timeout_ms: request.loss.transfer_timeout_ms,
        }
    }

    /// Takes the leases over, those of rows that turn out wrong as well, so that they are released.
    fn take_rows(&self, rows: &mut [PrefixRow]) -> Result<Held, RouterError> {
        let context = &self.context;
        let id = &self.request.request_id.to_string();
        let held = context
            .prefixes
            .hold(id, rows, (&context.members, self.request.loss.policy));
        let held = held.map_err(|reason| protocol(Role::ArStage, reason))?;
        self.check_rows(rows)?;
        Ok(held)
    }

    /// The stage must have built exactly the rows that were asked for, in order.
    fn check_rows(&self, rows: &[PrefixRow]) -> Result<(), RouterError> {
        let wanted: &[Kind] = if self.request.mode == Mode::Text {
            &[]
        } else if self.request.rows > 1 {
            &[Kind::Cond, Kind::Uncond]
        } else {
            &[Kind::Cond]
        };
        let right = rows.len() == wanted.len()
            && rows
                .iter()
                .zip(wanted)
                .all(|(row, &kind)| row.kind() == kind && row.prefix.is_some());
        if right {
            Ok(())
        } else {
            Err(protocol(
                Role::ArStage,
                "built other rows than it was asked for",
            ))
        }
    }
}

impl Prefix {
    /// What a worker needs to go on from it.
    pub(super) fn need(&self, picture: Drawing, seconds: Option<f64>) -> Need {
        let handles = self.done.rows.iter().filter_map(|row| row.prefix.as_ref());
        let host = handles
            .clone()
            .next()
            .map(|prefix| host_of(&prefix.endpoint));
        Need {
            host: host.unwrap_or_default().to_owned(),
            bytes: handles
                .map(|prefix| prefix.bytes)
                .fold(0, u64::saturating_add),
            seconds: seconds.unwrap_or_default(),
            picture: Some(picture),
        }
    }

    /// What the client is told of it.
    pub(super) fn written(&self) -> Written {
        let done = &self.done;
        Written {
            text: done.text.clone(),
            tokens: done.new_tokens,
            cut: done.cut,
            width: if done.rows.is_empty() {
                0
            } else {
                self.output.width
            },
            height: if done.rows.is_empty() {
                0
            } else {
                self.output.height
            },
            size_fallback: done.size_fallback,
            reused_tokens: done.reused_tokens,
            system_prompt: done.system_prompt.clone(),
        }
    }
}
