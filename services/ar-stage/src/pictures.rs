//! Pictures that the model is shown: from the bytes of a file to the vectors of their tokens.
use base::Failure;
use ingest::Limits;
use model::{
    Bucket, Latents, Model, RgbImage,
    cond::{CondFeatures, CondPixels},
    layout::CondImageGrid,
    noise,
    preprocess::{CondPicture, Fit},
    vit::Patches,
};
use parallel::RankContext;
use stage::StageError;

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
    model: &Model,
    files: &[Vec<u8>],
    seed: u64,
    align: bool,
) -> Result<Pictures, StageError> {
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
        let features = model.encode_cond_image(&RankContext::single(), pixels, &noise)?;
        pictures.grids.push(grid);
        pictures.sizes.push((image.height, image.width));
        pictures.features.push(features);
        pictures.buckets.push(picture.vae.bucket);
    }
    Ok(pictures)
}
