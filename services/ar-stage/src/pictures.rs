//! Pictures that the model is shown: from the bytes of a file to the vectors of their tokens.
use base::Failure;
use ingest::Limits;
use model::{
    Bucket, Latents, RgbImage,
    cond::{CondFeatures, CondPixels},
    layout::CondImageGrid,
    noise,
    preprocess::{CondPicture, Fit},
    vit::Patches,
};
use parallel::RankContext;
use stage::{Ranks, StageError};

/// Pictures of one request, in order.
#[derive(Debug, Clone, Default)]
pub(crate) struct Pictures {
    pub(crate) grids: Vec<CondImageGrid>,
    pub(crate) features: Vec<CondFeatures>,
    pub(crate) buckets: Vec<Bucket>,
    /// Height and width of each, upright.
    pub(crate) sizes: Vec<(usize, usize)>,
}

/// Decodes and encodes the files. `seed` picks the posterior samples, one for each picture; `align` says that
/// pictures are stretched to their buckets.
pub(crate) fn encode(
    ranks: &Ranks,
    files: &[Vec<u8>],
    seed: u64,
    align: bool,
) -> Result<Pictures, StageError> {
    let model = ranks.first();
    let config = model.config();
    let fit = if align { Fit::Stretch } else { Fit::Cover };
    let mut pictures = Pictures::default();
    for (index, file) in files.iter().enumerate() {
        let field = format!("images[{index}]");
        let refused = |error: ingest::IngestError| {
            StageError::Other(Failure::invalid("images", error.to_string()))
        };
        let decoded = ingest::decode(&field, file, &Limits::default()).map_err(refused)?;
        let image = RgbImage {
            width: decoded.width,
            height: decoded.height,
            data: decoded.rgb,
        };
        let picture = CondPicture::fitted(&image, model.buckets(), &config.vit_processor, fit)?;
        let grid = picture.grid(config.pixels_per_token());
        let (channels, h, w) = (config.vae.latent_channels, grid.vae.height, grid.vae.width);
        // Each picture has a stream of its own; the first has that of the seed.
        let stream = seed ^ (index as u64).wrapping_mul(0x2545_F491_4F6C_DD1D);
        let noise = noise::posterior_noise(stream, channels, h, w)?;
        let pixels = CondPixels {
            vae: &picture.vae.pixels,
            patches: Patches {
                values: &picture.vit.values,
                grid: picture.vit.grid,
            },
        };
        let noise = Latents::new(channels, h, w, noise)?;
        let features = features(ranks, pixels, &noise)?;
        pictures.grids.push(grid);
        pictures.sizes.push((image.height, image.width));
        pictures.features.push(features);
        pictures.buckets.push(picture.vae.bucket);
    }
    Ok(pictures)
}

/// What a picture puts into a sequence.
fn features(
    ranks: &Ranks,
    pixels: CondPixels<'_>,
    noise: &Latents,
) -> Result<CondFeatures, StageError> {
    let (model, alone) = (ranks.first(), RankContext::single());
    #[cfg(feature = "cuda")]
    if let Some(gpus) = ranks.gpus() {
        let latents = model.vae().sample(&gpus.encode(pixels.vae)?, noise)?;
        return gpus.features(&latents, pixels.patches);
    }
    Ok(model.encode_cond_image(&alone, pixels, noise)?)
}
