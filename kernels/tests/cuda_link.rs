//! Uploads through a ring of pinned buffers: every byte arrives at its place.
#![cfg(feature = "cuda")]
#![allow(clippy::unwrap_used)]

use kernels::cuda::{CudaError, Gpu, GpuTensor, GpuType, UploadRing, Uploader};

/// Byte `i` of the data of round `round`.
fn byte(round: usize, i: usize) -> u8 {
    (i * 31 + i / 251 + round * 17) as u8
}

#[test]
#[ignore = "needs a GPU"]
fn bytes_sent_through_any_ring_arrive_at_their_place_and_buffers_come_back() {
    let gpu = Gpu::open(0).unwrap();
    for (buffers, bytes) in [(2, 1 << 10), (3, 100_000), (9, 1 << 20)] {
        let mut uploader = Uploader::new(&gpu, &UploadRing { buffers, bytes }).unwrap();
        let total = 7 * bytes + 13;
        let to = GpuTensor::new(&gpu, &[total], GpuType::U8, "test").unwrap();
        for round in 0..3 {
            let mut free = uploader.buffers().unwrap();
            assert_eq!(free.len(), buffers);
            for start in (0..total).step_by(bytes) {
                let mut buffer = free.pop().unwrap();
                let len = bytes.min(total - start);
                for (i, b) in buffer.as_mut_slice()[..len].iter_mut().enumerate() {
                    *b = byte(round, start + i);
                }
                free.extend(uploader.send(&to, start, buffer, len).unwrap());
            }
            free.into_iter().for_each(|buffer| uploader.keep(buffer));
            // The compute stream, on which the tensor is read, sees what was sent.
            uploader.arrive(&gpu).unwrap();
            let want: Vec<u8> = (0..total).map(|i| byte(round, i)).collect();
            assert!(
                to.to_bytes().unwrap() == want,
                "{buffers} x {bytes}, round {round}"
            );
            uploader.hold(&gpu).unwrap();
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn uploads_that_do_not_fit_are_refused_before_anything_is_copied() {
    let gpu = Gpu::open(0).unwrap();
    let ring = |buffers| UploadRing { buffers, bytes: 64 };
    let one = Uploader::new(&gpu, &ring(1)).unwrap_err();
    assert!(matches!(one, CudaError::Argument(_)), "{one}");
    let mut uploader = Uploader::new(&gpu, &ring(2)).unwrap();
    let to = GpuTensor::new(&gpu, &[32], GpuType::U8, "test").unwrap();
    for (offset, bytes) in [(0, 33), (1, 32), (usize::MAX, 2), (0, 65)] {
        let mut free = uploader.buffers().unwrap();
        let refused = uploader.send(&to, offset, free.pop().unwrap(), bytes);
        assert!(
            matches!(refused, Err(CudaError::Argument(_))),
            "{offset} {bytes}"
        );
        free.into_iter().for_each(|buffer| uploader.keep(buffer));
        // The refused buffer is gone.
        uploader = Uploader::new(&gpu, &ring(2)).unwrap();
    }
}
