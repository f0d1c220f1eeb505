//! The same pictures from the same model inside this process, without any service.
use std::sync::{Arc, LazyLock};

use model::{
    DenoiseJob, JobSpec, LoadOptions, Model, PrefixKv, RgbImage, RowKind, RowTokens, T2iRequest,
};
use parallel::RankContext;
use proto::v1::GenerateRequest;

use crate::harness::model_dir;

/// The fixture model, opened once.
pub(crate) fn model() -> &'static Model {
    static MODEL: LazyLock<Model> =
        LazyLock::new(|| Model::open(&model_dir(), LoadOptions::default()).unwrap());
    &MODEL
}

/// The picture of a request whose size, steps, seed and guidance are all given.
pub(crate) fn picture(request: &GenerateRequest) -> RgbImage {
    let model = model();
    let size: proto::size::Size = request.size.parse().unwrap();
    let (height, width) = (size.height as usize, size.width as usize);
    let template = match request.template.as_str() {
        "" => model.info().default_template,
        name => name.parse().unwrap(),
    };
    let layout = model
        .layout_text_to_image(&T2iRequest {
            prompt: request.prompt.clone(),
            system_prompt: Some(request.system_prompt.clone()).filter(|text| !text.is_empty()),
            template,
            height,
            width,
        })
        .unwrap();
    let prefix = |kind| -> Arc<PrefixKv> {
        let row = RowTokens::new(&layout, kind);
        let mut rows = model.prefill(&RankContext::single(), &[&row]).unwrap();
        Arc::new(rows.remove(0))
    };
    let spec = JobSpec {
        height,
        width,
        steps: request.steps.unwrap() as usize,
        guidance: request.guidance.unwrap(),
        seed: request.seed.unwrap(),
        cond: Some(prefix(RowKind::Cond)),
        uncond: Some(prefix(RowKind::Uncond)),
    };
    let mut job = DenoiseJob::new(model, spec).unwrap();
    while !job.is_done() {
        model
            .denoise_step(&RankContext::single(), &mut [&mut job])
            .unwrap();
    }
    model
        .decode(&RankContext::single(), &job.latents().unwrap())
        .unwrap()
}
