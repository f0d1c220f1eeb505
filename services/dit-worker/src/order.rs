//! A request whose fields are understood, and the prefixes it names.
use std::time::{Duration, Instant};

use base::{
    Failure,
    limits::{MAX_GUIDANCE, MAX_PREVIEWS, MAX_SEED, MAX_STEPS},
};
use model::{JobState, ModelInfo, preprocess::MAX_INPUT_SIDE};
use proto::v1::{DenoiseRequest, PrefixHandle, PrefixRow, PreviewKind, Priority, prefix_row::Kind};
use stage::StageError;

use crate::{
    batch::{Class, Terms},
    checkpoint,
    denoiser::NewsPlan,
};

/// What to denoise.
#[derive(Debug, Clone)]
pub(crate) struct Order {
    pub(crate) request_id: String,
    pub(crate) height: usize,
    pub(crate) width: usize,
    pub(crate) steps: usize,
    pub(crate) guidance: f64,
    pub(crate) seed: u64,
    pub(crate) cond: PrefixHandle,
    pub(crate) uncond: Option<PrefixHandle>,
    /// Where another worker left it.
    pub(crate) resume: Option<JobState>,
    pub(crate) news: NewsPlan,
    pub(crate) class: Class,
    /// When the request came to a router.
    pub(crate) arrived: Instant,
    /// When it is of no use any more.
    pub(crate) due: Option<Instant>,
    /// Height and width that the image is scaled to, if it is.
    pub(crate) output: Option<(usize, usize)>,
    /// Epoch of the cluster that the request was decided on.
    pub(crate) epoch: u64,
    /// Bound of fetching a prefix, if the request has one.
    pub(crate) transfer_timeout: Option<Duration>,
}

impl Order {
    /// Reads and checks the request; nothing has been fetched yet.
    pub(crate) fn new(
        request: DenoiseRequest,
        info: &ModelInfo,
        channels: usize,
    ) -> Result<Self, StageError> {
        let (height, width) = (request.height as usize, request.width as usize);
        let legal = |bucket: &model::Bucket| bucket.height == height && bucket.width == width;
        if !info.buckets.iter().any(legal) {
            return Err(invalid(
                "size",
                format!("{width}x{height} is no size of this model"),
            ));
        }
        check_numbers(&request)?;
        let kind = PreviewKind::try_from(request.preview_kind).map_err(|_| {
            let got = request.preview_kind;
            invalid("preview_kind", format!("{got} is no kind of preview"))
        })?;
        let class = class(request.priority)?;
        let output = output(&request)?;
        let (cond, uncond) = prefixes(request.rows)?;
        let grid = (
            height / info.pixels_per_token,
            width / info.pixels_per_token,
        );
        let resume = request.resume.map(|from| {
            let read = checkpoint::read(&from, channels, grid);
            read.map_err(|reason| invalid("resume", reason))
        });
        let resume = resume.transpose()?;
        if resume
            .as_ref()
            .is_some_and(|state| state.step > request.steps as usize)
        {
            return Err(invalid(
                "resume",
                "has more steps than the request".to_owned(),
            ));
        }
        Ok(Self {
            request_id: request.request_id,
            height,
            width,
            steps: request.steps as usize,
            guidance: request.guidance,
            seed: request.seed,
            cond,
            uncond,
            resume,
            news: NewsPlan {
                checkpoint_every: request.checkpoint_every as usize,
                previews: request.previews as usize,
                vae: kind == PreviewKind::Vae,
            },
            class,
            due: None,
            arrived: Terms::new(class, Duration::from_millis(request.age_ms.into())).arrived,
            output,
            epoch: request.epoch,
            transfer_timeout: Some(request.transfer_timeout_ms)
                .filter(|ms| *ms > 0)
                .map(|ms| Duration::from_millis(ms.into())),
        })
    }

    /// What the batch is told of it.
    pub(crate) fn terms(&self) -> Terms {
        let uncond = self.uncond.as_ref().map_or(0, |prefix| prefix.tokens);
        Terms {
            class: self.class,
            arrived: self.arrived,
            due: self.due,
            prefix: self.cond.tokens.max(uncond) as usize,
            steps: self.steps,
        }
    }
}

/// What the image is scaled to, if it is.
fn output(request: &DenoiseRequest) -> Result<Option<(usize, usize)>, StageError> {
    let (height, width) = (request.output_height, request.output_width);
    match (height, width) {
        (0, 0) => Ok(None),
        (1.., 1..) if height.max(width) as usize <= MAX_INPUT_SIDE => {
            Ok(Some((height as usize, width as usize)))
        }
        _ => Err(invalid(
            "output",
            format!("{width}x{height} is no size to scale to"),
        )),
    }
}

/// Every number of the request that has bounds of its own.
fn check_numbers(request: &DenoiseRequest) -> Result<(), StageError> {
    if !(1..=MAX_STEPS).contains(&request.steps) {
        return Err(invalid(
            "steps",
            format!("must be 1 to {MAX_STEPS}, got {}", request.steps),
        ));
    }
    // NaN is in no range.
    if !(0.0..=MAX_GUIDANCE).contains(&request.guidance) {
        let got = request.guidance;
        return Err(invalid(
            "guidance",
            format!("must be 0 to {MAX_GUIDANCE}, got {got}"),
        ));
    }
    if request.seed > MAX_SEED {
        return Err(invalid(
            "seed",
            format!("must be 0 to {MAX_SEED}, got {}", request.seed),
        ));
    }
    if request.previews > MAX_PREVIEWS {
        let got = request.previews;
        return Err(invalid(
            "previews",
            format!("must be 0 to {MAX_PREVIEWS}, got {got}"),
        ));
    }
    Ok(())
}

fn class(priority: i32) -> Result<Class, StageError> {
    Ok(match Priority::try_from(priority) {
        Ok(Priority::Interactive) => Class::Interactive,
        Ok(Priority::Unspecified | Priority::Standard) => Class::Standard,
        Ok(Priority::Background) => Class::Background,
        Err(_) => return Err(invalid("priority", format!("{priority} is no class"))),
    })
}

/// One cond row, and at most one uncond row.
fn prefixes(rows: Vec<PrefixRow>) -> Result<(PrefixHandle, Option<PrefixHandle>), StageError> {
    let (mut cond, mut uncond) = (None, None);
    for row in rows {
        let place = match row.kind() {
            Kind::Cond => &mut cond,
            Kind::Uncond => &mut uncond,
            Kind::Unspecified => return Err(invalid("rows", "one row has no kind".to_owned())),
        };
        let prefix = row
            .prefix
            .ok_or_else(|| invalid("rows", "one row has no prefix".to_owned()))?;
        if place.replace(prefix).is_some() {
            return Err(invalid("rows", "two rows have the same kind".to_owned()));
        }
    }
    let cond = cond.ok_or_else(|| invalid("rows", "the cond row is missing".to_owned()))?;
    Ok((cond, uncond))
}

fn invalid(field: &'static str, reason: String) -> StageError {
    StageError::Other(Failure::invalid(field, format!("{field}: {reason}")))
}

#[cfg(test)]
mod tests {
    use base::{Code, Fault as _};

    use super::*;

    fn row(kind: Kind) -> PrefixRow {
        PrefixRow {
            kind: kind.into(),
            prefix: Some(PrefixHandle::default()),
        }
    }

    fn info() -> ModelInfo {
        ModelInfo {
            name: "tiny".to_owned(),
            weights_id: "w".to_owned(),
            buckets: vec![model::Bucket {
                ratio_index: 0,
                height: 32,
                width: 64,
            }],
            default_steps: 4,
            default_guidance: 5.0,
            cfg_distilled: false,
            max_sequence_tokens: 100,
            default_template: model::Template::Pretrain,
            kv: kv::KvGeometry {
                layers: 1,
                kv_heads: 1,
                head_dim: 2,
                dtype: kv::KvDType::F32,
            },
            pixels_per_token: 16,
            default_mode: "image".to_owned(),
            system_prompts: Vec::new(),
            max_new_tokens: 16,
        }
    }

    fn good() -> DenoiseRequest {
        DenoiseRequest {
            request_id: "r".to_owned(),
            epoch: 1,
            output_height: 0,
            output_width: 0,
            weights_id: "w".to_owned(),
            rows: vec![row(Kind::Cond), row(Kind::Uncond)],
            height: 32,
            width: 64,
            steps: 4,
            guidance: 5.0,
            seed: 7,
            resume: Some(checkpoint::write(&state(2)).unwrap()),
            checkpoint_every: 5,
            previews: 2,
            preview_kind: PreviewKind::Linear.into(),
            priority: Priority::Background.into(),
            age_ms: 2_000,
            transfer_timeout_ms: 0,
        }
    }

    /// The latents of a picture of 2 x 4 tokens after `step` steps.
    fn state(step: usize) -> JobState {
        let values = (0..24).map(|i| (i as f32).sin()).collect();
        let latents = model::Latents::new(3, 2, 4, values).unwrap();
        JobState { step, latents }
    }

    #[test]
    fn a_good_request_is_read_whole() {
        let order = Order::new(good(), &info(), 3).unwrap();
        assert_eq!((order.height, order.width, order.steps), (32, 64, 4));
        assert!(order.uncond.is_some());
        assert_eq!(order.resume.as_ref(), Some(&state(2)));
        assert_eq!(
            (order.news.checkpoint_every, order.class),
            (5, Class::Background)
        );
        let terms = order.terms();
        assert_eq!((terms.steps, terms.class), (4, Class::Background));
        assert!(base::clock::millis_since(terms.arrived) >= 2_000.0);
    }

    #[test]
    fn each_bad_field_is_refused_by_name() {
        type Spoil = fn(&mut DenoiseRequest);
        let cases: [(&str, Spoil); 18] = [
            ("size", |r| r.width = 32),
            ("size", |r| r.height = 0),
            ("steps", |r| r.steps = 0),
            ("steps", |r| r.steps = 201),
            ("guidance", |r| r.guidance = f64::NAN),
            ("guidance", |r| r.guidance = -3.0),
            ("guidance", |r| r.guidance = 1e9),
            ("seed", |r| r.seed = 1 << 63),
            ("rows", |r| r.rows.clear()),
            ("rows", |r| r.rows.push(row(Kind::Cond))),
            ("rows", |r| r.rows[0].prefix = None),
            ("previews", |r| r.previews = 4),
            ("preview_kind", |r| r.preview_kind = 9),
            ("priority", |r| r.priority = 7),
            ("resume", |r| r.steps = 1),
            ("resume", |r| r.resume.as_mut().unwrap().crc32c ^= 1),
            ("resume", |r| {
                r.resume.as_mut().unwrap().latents.truncate(92);
            }),
            ("resume", |r| {
                let mut other = state(2);
                other.latents = model::Latents::new(3, 4, 2, vec![f32::NAN; 24]).unwrap();
                r.resume = Some(checkpoint::write(&other).unwrap());
            }),
        ];
        for (field, spoil) in cases {
            let mut request = good();
            spoil(&mut request);
            let error = Order::new(request, &info(), 3).unwrap_err();
            assert_eq!(error.code(), Code::InvalidArgument, "{field}");
            assert_eq!(error.field(), Some(field), "{error}");
        }
    }
}
