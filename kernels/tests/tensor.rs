//! Tensors: views, types, sizes, and what is refused.
#![allow(missing_docs, clippy::unwrap_used)]

mod common;

use common::random;
use kernels::{
    DType, Device, KernelError, LinearWeight, Tensor, add, bf16, linear, rms_norm, swiglu_up_gate,
};

#[test]
fn views_share_elements_and_know_their_shape() {
    let x = random(1, &[4, 3, 2]);
    let view = x.narrow0(1, 2).unwrap().reshape(&[6, 2]).unwrap();
    assert_eq!(view.shape(), [6, 2]);
    assert_eq!(view.as_f32().unwrap(), &x.as_f32().unwrap()[6..18]);
    assert_eq!(
        view.as_f32().unwrap().as_ptr(),
        x.as_f32().unwrap()[6..].as_ptr()
    );
    assert_eq!(
        (view.numel(), view.rank(), view.dim(1), view.dim(7)),
        (12, 2, 2, 1)
    );
    assert_eq!((x.dtype(), x.device()), (DType::F32, Device::Cpu));
}

#[test]
fn writing_to_a_shared_tensor_copies_first() {
    let x = random(1, &[4, 3]);
    let mut view = x.narrow0(1, 1).unwrap();
    view.as_f32_mut().unwrap().fill(9.0);
    assert_eq!(view.to_f32_vec(), [9.0; 3]);
    assert_eq!(x.to_f32_vec(), random(1, &[4, 3]).to_f32_vec());
    let mut own = Tensor::zeros(&[2]).unwrap();
    let before = own.as_f32().unwrap().as_ptr();
    own.as_f32_mut().unwrap()[1] = 1.0;
    assert_eq!(
        (own.as_f32().unwrap().as_ptr(), own.to_f32_vec()),
        (before, vec![0.0, 1.0])
    );
}

#[test]
fn concatenation_keeps_order_and_checks_the_other_dimensions() {
    let (a, b) = (random(1, &[2, 3]), random(2, &[1, 3]));
    let joined = Tensor::concat0(&[&a, &b]).unwrap();
    assert_eq!(joined.shape(), [3, 3]);
    assert_eq!(
        joined.to_f32_vec(),
        [a.to_f32_vec(), b.to_f32_vec()].concat()
    );
    assert!(Tensor::concat0(&[&a, &random(3, &[1, 2])]).is_err());
    assert!(Tensor::concat0(&[]).is_err());
}

#[test]
fn a_size_that_no_machine_has_is_refused_before_allocation() {
    for shape in [
        vec![usize::MAX, 2],
        vec![1 << 40, 1 << 40],
        vec![usize::MAX],
    ] {
        assert!(
            matches!(Tensor::zeros(&shape), Err(KernelError::Shape { .. })),
            "{shape:?}"
        );
    }
    assert!(matches!(
        Tensor::zeros(&[1; 7]),
        Err(KernelError::Bounds { what: "rank", .. })
    ));
}

#[test]
fn wrong_lengths_types_and_ranges_are_typed_errors() {
    assert!(matches!(
        Tensor::from_f32(&[2, 2], vec![0.0; 3]),
        Err(KernelError::Shape { .. })
    ));
    let narrow = Tensor::from_bf16(&[2], vec![bf16::from_f32(1.5); 2]).unwrap();
    assert!(matches!(
        narrow.as_f32(),
        Err(KernelError::DType {
            got: DType::Bf16,
            ..
        })
    ));
    assert_eq!(narrow.to_f32().to_f32_vec(), [1.5, 1.5]);
    let x = random(1, &[4, 3]);
    assert!(matches!(x.narrow0(2, 3), Err(KernelError::Bounds { .. })));
    assert!(matches!(
        x.narrow0(usize::MAX, 2),
        Err(KernelError::Bounds { .. })
    ));
    assert!(x.reshape(&[5, 3]).is_err());
}

#[test]
fn operations_name_the_argument_they_refuse() {
    let x = random(1, &[4, 3]);
    let message = |r: kernels::Result<Tensor>| r.unwrap_err().to_string();
    let w = LinearWeight::new(&random(2, &[5, 4]), None).unwrap();
    assert_eq!(
        message(linear(&x, &w)),
        "linear: x has shape [4, 3], expected [_, 4]"
    );
    let norm = rms_norm(&x, &random(3, &[4]), 1e-5);
    assert_eq!(
        message(norm),
        "rms_norm: weight has shape [4], expected [3]"
    );
    assert!(message(add(&x, &random(4, &[3, 4]))).contains("y has shape"));
    assert!(message(swiglu_up_gate(&x)).contains("even"));
    let narrow = Tensor::from_bf16(&[1, 4], vec![bf16::ZERO; 4]).unwrap();
    assert_eq!(
        message(linear(&narrow, &w)),
        "linear: x is Bf16, expected F32"
    );
}

#[test]
fn no_rows_is_an_empty_answer() {
    let x = Tensor::zeros(&[0, 3]).unwrap();
    let w = LinearWeight::new(&random(2, &[5, 3]), None).unwrap();
    assert_eq!(linear(&x, &w).unwrap().shape(), [0, 5]);
    assert_eq!(
        rms_norm(&x, &random(3, &[3]), 1e-5).unwrap().shape(),
        [0, 3]
    );
}
