//! The list of files.

use image::{DynamicImage, ExtendedColorType as Kind};
use ingest::Format::{Gif, Jpeg, Png, WebP};

use crate::{
    LIMITS,
    Outcome::{self, Cut, Empty, Ends, Flat, Malformed, NoPixels, TooLarge, TooManyBytes, Unknown},
    jpeg::{self, Adobe},
    make::{
        SIZE, apng, chunk, exif, flat, gif, grey_png, halves, jpeg as jpeg_of, one_of_each,
        palette_png, png, png_header_only, png_of, rgba, riff, riff_chunk, vp8x, webp, with_chunk,
        with_segment,
    },
};

type File = (String, Vec<u8>, Outcome);

const PINK: [u8; 3] = [200, 40, 90];
const BLUE: [u8; 3] = [10, 20, 220];
const WHITE: [u8; 3] = [255; 3];
const W: usize = SIZE.0 as usize;
const H: usize = SIZE.1 as usize;
const AREA: usize = W * H;

fn file(name: &str, bytes: impl Into<Vec<u8>>, outcome: Outcome) -> File {
    (name.to_owned(), bytes.into(), outcome)
}

/// Every file.
pub(crate) fn all() -> Vec<File> {
    [
        plain(),
        colours(),
        transparent(),
        turned(),
        animated(),
        jpegs(),
        containers(),
        broken(),
        bombs(),
        foreign(),
    ]
    .concat()
}

fn plain() -> Vec<File> {
    let whole = |(name, bytes)| file(name, bytes, Flat((W, H), PINK));
    let trailing = |(name, bytes): (&str, Vec<u8>)| {
        let bytes = [bytes, b"garbage \xff\xd8 behind the end".to_vec()].concat();
        file(&format!("{name} and garbage"), bytes, Flat((W, H), PINK))
    };
    let each = one_of_each();
    let mut files: Vec<File> = each.clone().into_iter().map(whole).collect();
    files.extend(each.into_iter().map(trailing));
    files
}

/// Samples repeated over the picture.
fn samples(pixel: &[u8]) -> Vec<u8> {
    pixel.repeat(AREA)
}

fn colours() -> Vec<File> {
    use png::BitDepth::{Eight, Four, One, Two};
    let palette = [BLUE, PINK].concat();
    let sixteen = [200_u16, 40, 90].map(|level| level * 257);
    let sixteen: Vec<u8> = sixteen.iter().flat_map(|v| v.to_ne_bytes()).collect();
    let grey = 77_u16 * 257;
    let mut files = vec![
        file(
            "grey png",
            png_of(&samples(&[77]), Kind::L8),
            Flat((W, H), [77; 3]),
        ),
        file(
            "16-bit grey png",
            png_of(&samples(&grey.to_ne_bytes()), Kind::L16),
            Flat((W, H), [77; 3]),
        ),
        file(
            "16-bit png",
            png_of(&samples(&sixteen), Kind::Rgb16),
            Flat((W, H), PINK),
        ),
    ];
    for (bits, depth) in [(1, One), (2, Two), (4, Four), (8, Eight)] {
        let name = format!("palette png of {bits} bits");
        files.push(file(
            &name,
            palette_png(depth, &palette, &[]),
            Flat((W, H), PINK),
        ));
        if bits < 8 {
            let name = format!("grey png of {bits} bits");
            files.push(file(&name, grey_png(depth), Flat((W, H), WHITE)));
        }
    }
    files
}

fn transparent() -> Vec<File> {
    let half = [200, 40, 90, 128];
    // value * 128 / 255 + 255 * 127 / 255
    let mixed = [227, 147, 172];
    let deep: Vec<u8> = half
        .iter()
        .flat_map(|level| (u16::from(*level) * 257).to_ne_bytes())
        .collect();
    let palette = [BLUE, PINK].concat();
    vec![
        file(
            "half transparent png",
            png_of(&samples(&half), Kind::Rgba8),
            Flat((W, H), mixed),
        ),
        file(
            "transparent png",
            png_of(&samples(&[9, 9, 9, 0]), Kind::Rgba8),
            Flat((W, H), WHITE),
        ),
        file(
            "half transparent 16-bit png",
            png_of(&samples(&deep), Kind::Rgba16),
            Flat((W, H), mixed),
        ),
        file(
            "half transparent grey png",
            png_of(&samples(&[0, 128]), Kind::La8),
            Flat((W, H), [127; 3]),
        ),
        file(
            "palette png with a transparent colour",
            palette_png(png::BitDepth::Eight, &palette, &[255, 0]),
            Flat((W, H), WHITE),
        ),
        file(
            "half transparent webp",
            webp(&DynamicImage::ImageRgba8(rgba(half))),
            Flat((W, H), mixed),
        ),
        file(
            "transparent gif",
            gif(&[rgba([0, 0, 0, 0])]),
            Flat((W, H), WHITE),
        ),
    ]
}

/// Orientations by number, and where the left half of a lying picture then is.
fn turned() -> Vec<File> {
    let size = (16, 8);
    let picture = halves(PINK, BLUE, size);
    let (lying, standing) = ((16, 8), (8, 16));
    let ends = [
        (1, lying, PINK, BLUE),
        (2, lying, BLUE, PINK),
        (3, lying, BLUE, PINK),
        (4, lying, PINK, BLUE),
        (5, standing, PINK, BLUE),
        (6, standing, PINK, BLUE),
        (7, standing, BLUE, PINK),
        (8, standing, BLUE, PINK),
    ];
    let mut files = Vec::new();
    for (number, size, first, last) in ends {
        let block = exif(number, number % 2 == 0);
        let app1 = [&b"Exif\0\0"[..], &block].concat();
        let bytes = with_segment(&jpeg_of(&picture), 0xe1, &app1);
        let name = format!("jpeg of orientation {number}");
        files.push(file(&name, bytes, Ends(size, first, last)));
    }
    let upright = Ends(lying, PINK, BLUE);
    let png = png(&picture);
    let lossless = webp(&picture.clone().into());
    let odd = |body: &[u8]| with_segment(&jpeg_of(&picture), 0xe1, body);
    files.extend([
        file(
            "png of orientation 6",
            with_chunk(&png, b"eXIf", &exif(6, true)),
            Ends(standing, PINK, BLUE),
        ),
        file(
            "webp of orientation 8",
            riff(&[
                vp8x(0x08, size),
                lossless[12..].to_vec(),
                riff_chunk(b"EXIF", &exif(8, false)),
            ]),
            Ends(standing, BLUE, PINK),
        ),
        file(
            "jpeg of orientation 0",
            odd(&[&b"Exif\0\0"[..], &exif(0, true)].concat()),
            upright,
        ),
        file(
            "jpeg of orientation 9",
            odd(&[&b"Exif\0\0"[..], &exif(9, true)].concat()),
            upright,
        ),
        file("jpeg whose exif block is empty", odd(b"Exif\0\0"), upright),
        file(
            "jpeg whose exif block is cut",
            odd(b"Exif\0\0MM\0*\0\0\0\x08\0\x01"),
            upright,
        ),
        file(
            "jpeg whose exif block points nowhere",
            odd(b"Exif\0\0II*\0\xff\xff\xff\xff"),
            upright,
        ),
    ]);
    files
}

fn animated() -> Vec<File> {
    let frames = [rgba([200, 40, 90, 255]), rgba([10, 20, 220, 255])];
    let two = gif(&frames);
    let mut no_frame = two[..13].to_vec();
    no_frame[10] &= 0x7f;
    no_frame.push(0x3b);
    // A frame of an animation: place, size less one, duration, flags, then a picture.
    let frame = |picture: &[u8]| {
        let place = [
            0,
            0,
            0,
            0,
            0,
            0,
            W as u8 - 1,
            0,
            0,
            H as u8 - 1,
            0,
            0,
            50,
            0,
            0,
            0,
        ];
        riff_chunk(b"ANMF", &[&place[..], picture].concat())
    };
    let still = |colour| webp(&flat(colour).into())[12..].to_vec();
    let webp = riff(&[
        vp8x(0x02, SIZE),
        riff_chunk(b"ANIM", &[0; 6]),
        frame(&still(PINK)),
        frame(&still(BLUE)),
    ]);
    vec![
        file("animated gif", two.clone(), Flat((W, H), PINK)),
        file(
            "animated gif cut in its second frame",
            &two[..two.len() - 6],
            Cut(Gif),
        ),
        file("gif without a frame", no_frame, Cut(Gif)),
        file("animated png", apng(PINK, BLUE), Flat((W, H), PINK)),
        file("animated webp", webp, Flat((W, H), PINK)),
        file(
            "animated webp without a frame",
            riff(&[vp8x(0x02, SIZE), riff_chunk(b"ANIM", &[0; 6])]),
            Cut(WebP),
        ),
    ]
}

fn jpegs() -> Vec<File> {
    let small = (8, 8);
    let grey = flat([90; 3]);
    let mut grey_jpeg = Vec::new();
    image::codecs::jpeg::JpegEncoder::new(&mut grey_jpeg)
        .encode_image(&DynamicImage::ImageRgb8(grey).into_luma8())
        .unwrap();
    let no_end = jpeg_of(&flat(PINK));
    let no_end = &no_end[..no_end.len() - 2];
    let mut twelve = jpeg::flat(&[128], (8, 8), Adobe::None);
    let frame = twelve.windows(2).position(|w| w == [0xff, 0xc0]).unwrap();
    twelve[frame + 4] = 12;
    let mut arithmetic = jpeg_of(&flat(PINK));
    let frame = arithmetic
        .windows(2)
        .position(|w| w == [0xff, 0xc0])
        .unwrap();
    arithmetic[frame + 1] = 0xc9;
    vec![
        file("grey jpeg", grey_jpeg, Flat((W, H), [90; 3])),
        file(
            "hand-made grey jpeg",
            jpeg::flat(&[60], (8, 8), Adobe::None),
            Flat(small, [60; 3]),
        ),
        // Adobe stores inks inverted: 255 is no ink.
        file(
            "cmyk jpeg without ink",
            jpeg::flat(&[255; 4], (8, 8), Adobe::Plain),
            Flat(small, WHITE),
        ),
        file(
            "cmyk jpeg with all black",
            jpeg::flat(&[255, 255, 255, 0], (8, 8), Adobe::Plain),
            Flat(small, [0; 3]),
        ),
        file(
            "cmyk jpeg of pure cyan",
            jpeg::flat(&[0, 255, 255, 255], (8, 8), Adobe::Plain),
            Flat(small, [0, 255, 255]),
        ),
        // The first three are the inks' complement, inverted once more by Adobe.
        file(
            "ycck jpeg without ink",
            jpeg::flat(&[0, 128, 128, 255], (8, 8), Adobe::Ycck),
            Flat(small, WHITE),
        ),
        file("jpeg without its end marker", no_end, Cut(Jpeg)),
        file("jpeg of 12 bits", twelve, Malformed(Jpeg)),
        file("arithmetic jpeg", arithmetic, Malformed(Jpeg)),
        file(
            "jpeg with a comment",
            with_segment(&jpeg_of(&flat(PINK)), 0xfe, b"\xff\xd9 is no end here"),
            Flat((W, H), PINK),
        ),
        file(
            "jpeg with a thumbnail",
            with_segment(&jpeg_of(&flat(PINK)), 0xe2, &jpeg_of(&flat(BLUE))),
            Flat((W, H), PINK),
        ),
        file(
            "jpeg of no lines",
            jpeg::flat(&[60], (8, 0), Adobe::None),
            NoPixels,
        ),
    ]
}

fn containers() -> Vec<File> {
    let whole = png(&flat(PINK));
    let mut flipped = whole.clone();
    let at = flipped.len() - 20;
    flipped[at] ^= 0x55;
    let no_data = [&whole[..33], &chunk(b"IEND", &[])].concat();
    let ihdr_late = [&whole[..8], &chunk(b"tEXt", b"a\0b"), &whole[8..]].concat();
    let mut long = whole.clone();
    long[33..37].copy_from_slice(&u32::MAX.to_be_bytes());
    let mut riff_long = webp(&flat(PINK).into());
    riff_long[4..8].copy_from_slice(&u32::MAX.to_le_bytes());
    let mut gif_block = gif(&[rgba([1, 2, 3, 255])]);
    let end = gif_block.len() - 1;
    gif_block[end] = 0x99;
    // The palette chunk, and one with a byte more than whole entries.
    let palette = palette_png(png::BitDepth::Eight, &[BLUE, PINK].concat(), &[]);
    let odd = [
        &palette[..33],
        &chunk(b"PLTE", &[1, 2, 3, 4, 5, 6, 7]),
        &palette[33 + 18..],
    ]
    .concat();
    vec![
        file("png with half an entry in its palette", odd, Malformed(Png)),
        file("png with a damaged chunk", flipped, Malformed(Png)),
        file("png without data", no_data, Cut(Png)),
        file("png whose header comes late", ihdr_late, Malformed(Png)),
        file("png with an endless chunk", long, Cut(Png)),
        file(
            "png with text",
            with_chunk(&whole, b"tEXt", b"Comment\0hello"),
            Flat((W, H), PINK),
        ),
        file("webp that promises too much", riff_long, Cut(WebP)),
        file(
            "webp of another kind",
            riff(&[riff_chunk(b"ALPH", &[0; 20])]),
            Malformed(WebP),
        ),
        file("gif with an unknown block", gif_block, Malformed(Gif)),
        file(
            "webp whose canvas is another",
            riff(&[vp8x(0, (40, 40)), webp(&flat(PINK).into())[12..].to_vec()]),
            Malformed(WebP),
        ),
    ]
}

fn broken() -> Vec<File> {
    let mut files = vec![file("nothing", [], Empty)];
    for ((name, bytes), format) in one_of_each().into_iter().zip([Png, Jpeg, WebP, Gif]) {
        files.push(file(
            &format!("half a {name}"),
            &bytes[..bytes.len() / 2],
            Cut(format),
        ));
        files.push(file(
            &format!("{name} without its last byte"),
            &bytes[..bytes.len() - 1],
            Cut(format),
        ));
    }
    files.push(file("the first byte of a png", [0x89], Cut(Png)));
    files.push(file("the first bytes of a jpeg", [0xff, 0xd8], Cut(Jpeg)));
    files
}

fn bombs() -> Vec<File> {
    let text = with_chunk(
        &png(&flat(PINK)),
        b"zTXt",
        &[b"k\0\0".to_vec(), vec![0x55; 9_000]].concat(),
    );
    let mut screen = gif(&[rgba([1, 2, 3, 255])]);
    screen[6..10].copy_from_slice(&[0xff; 4]);
    let mut lines = jpeg_of(&flat(PINK));
    let frame = lines.windows(2).position(|w| w == [0xff, 0xc0]).unwrap();
    lines[frame + 5..frame + 9].copy_from_slice(&[0xff; 4]);
    vec![
        file(
            "png of 4 gigapixels",
            png_header_only(65_535, 65_535),
            TooLarge,
        ),
        file(
            "png of the largest size",
            png_header_only(u32::MAX, u32::MAX),
            TooLarge,
        ),
        file("png that is too wide", png_header_only(513, 1), TooLarge),
        file(
            "png of too large an area",
            png_header_only(512, 129),
            TooLarge,
        ),
        file("png of no width", png_header_only(0, 4), NoPixels),
        file(
            "png with less data than it says",
            png_header_only(200, 200),
            Malformed(Png),
        ),
        file("gif of a large screen", screen, TooLarge),
        file("jpeg of a large frame", lines, TooLarge),
        file(
            "webp of a large canvas",
            riff(&[
                vp8x(0, (16_384, 16_384)),
                webp(&flat(PINK).into())[12..].to_vec(),
            ]),
            TooLarge,
        ),
        file("png with text that is no zlib", text, Flat((W, H), PINK)),
        file("too many bytes", vec![0; LIMITS.bytes + 1], TooManyBytes),
    ]
}

fn foreign() -> Vec<File> {
    vec![
        file("text", "this is no picture", Unknown),
        file(
            "svg",
            "<svg xmlns=\"http://www.w3.org/2000/svg\"/>",
            Unknown,
        ),
        file("bmp", b"BM\x3a\0\0\0\0\0\0\0\x36\0\0\0".to_vec(), Unknown),
        file("tiff", b"II*\0\x08\0\0\0".to_vec(), Unknown),
        file("pdf", "%PDF-1.7", Unknown),
        file("wave", b"RIFF\x04\0\0\0WAVE".to_vec(), Unknown),
        file("avif", b"\0\0\0\x1cftypavif\0\0\0\0".to_vec(), Unknown),
        file("zip", b"PK\x03\x04".to_vec(), Unknown),
        file("one zero", [0], Unknown),
        file("zeros", [0; 4_096], Unknown),
    ]
}
