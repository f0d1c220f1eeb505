//! A JPEG writer for what encoders do not write: any number of components, flat colours only.

use crate::make::segment;

/// Writes bits, most significant first, with stuffing.
#[derive(Default)]
struct Bits {
    out: Vec<u8>,
    byte: u32,
    count: u32,
}

impl Bits {
    fn put(&mut self, value: u32, count: u32) {
        for bit in (0..count).rev() {
            self.byte = self.byte << 1 | (value >> bit & 1);
            self.count += 1;
            if self.count == 8 {
                self.out.push(self.byte as u8);
                if self.byte == 0xff {
                    self.out.push(0);
                }
                (self.byte, self.count) = (0, 0);
            }
        }
    }

    fn finish(mut self) -> Vec<u8> {
        while self.count != 0 {
            self.put(1, 1);
        }
        self.out
    }
}

/// What an Adobe segment says of the colours.
#[derive(Clone, Copy)]
pub(crate) enum Adobe {
    /// There is no such segment.
    None,
    /// The components are stored as they are.
    Plain,
    /// The first three of four are luminance and two chrominances.
    Ycck,
}

/// A baseline JPEG of one block a component: `size` at most 8 by 8, every component flat.
pub(crate) fn flat(components: &[u8], (width, height): (u8, u8), adobe: Adobe) -> Vec<u8> {
    let count = components.len() as u8;
    let mut frame = vec![8, 0, height, 0, width, count];
    let mut scan = vec![count];
    for id in 1..=count {
        frame.extend([id, 0x11, 0]);
        scan.extend([id, 0]);
    }
    scan.extend([0, 63, 0]);
    // DC: categories 0 to 11 as four-bit codes. AC: the end of the block as a one-bit code.
    let categories: Vec<u8> = (0..12).collect();
    let dc_table = [&[0x00, 0, 0, 0, 12][..], &[0; 12], &categories].concat();
    let ac_table = [&[0x10][..], &[1], &[0; 15], &[0]].concat();
    let mut bits = Bits::default();
    for value in components {
        // A flat block of value v has the DC coefficient 8 (v - 128); the quantiser is 1.
        let level = (i32::from(*value) - 128) * 8;
        let size = 32 - level.unsigned_abs().leading_zeros();
        bits.put(size, 4);
        let code = if level < 0 {
            level + (1 << size) - 1
        } else {
            level
        };
        bits.put(code as u32, size);
        bits.put(0, 1);
    }
    let transform = match adobe {
        Adobe::Ycck => 2,
        _ => 0,
    };
    let app14 = [&b"Adobe\0"[..], &[100, 0, 0, 0, 0], &[transform]].concat();
    [
        vec![0xff, 0xd8],
        match adobe {
            Adobe::None => vec![],
            _ => segment(0xee, &app14),
        },
        segment(0xdb, &[&[0][..], &[1; 64]].concat()),
        segment(0xc0, &frame),
        segment(0xc4, &dc_table),
        segment(0xc4, &ac_table),
        segment(0xda, &scan),
        bits.finish(),
        vec![0xff, 0xd9],
    ]
    .concat()
}
