use super::*;
use crate::LayerShape;
use crate::shape::tests::published;

fn with(axis: Axis, size: usize) -> Plan {
    Plan::default().with_size(axis, size)
}

fn refusal(plan: Plan, shape: &ModelShape) -> String {
    plan.validate(shape).unwrap_err().to_string()
}

#[test]
fn ranks_talk_along_the_axes_that_have_ranks() {
    assert_eq!(Plan::default().groups().unwrap(), []);
    let plan = Plan {
        cfg: 2,
        ulysses: 2,
        ep: AxisSet::EXPERTS,
        ..Plan::default()
    };
    let both = AxisSet::of(&[Axis::Cfg, Axis::Ulysses]);
    assert_eq!(
        plan.groups().unwrap(),
        [Axis::Cfg.into(), Axis::Ulysses.into(), both]
    );
}

#[test]
fn the_published_model_takes_the_plans_of_one_host() {
    let shape = published();
    for plan in [
        Plan::default(),
        with(Axis::Tp, 8),
        with(Axis::Ulysses, 8),
        with(Axis::Ring, 7),
        with(Axis::Pp, 5),
        with(Axis::Cfg, 2),
        Plan {
            cfg: 2,
            tp: 4,
            ep: AxisSet::EXPERTS,
            ..Plan::default()
        },
        // 16 head shards of 8 KV heads: each KV head is held twice.
        Plan {
            ulysses: 4,
            tp: 4,
            ep: AxisSet::HEADS,
            ..Plan::default()
        },
    ] {
        let mesh = plan.validate(&shape).unwrap();
        assert_eq!(mesh.ranks(), plan.sizes().iter().product::<usize>());
    }
}

#[test]
fn heads_that_do_not_divide_name_their_axes() {
    let mut shape = published();
    assert_eq!(
        refusal(with(Axis::Tp, 3), &shape),
        "plan axis tp = 3: it must divide the query heads, got 32"
    );
    assert_eq!(
        refusal(
            Plan {
                ulysses: 3,
                tp: 2,
                ..Plan::default()
            },
            &shape
        ),
        "plan axis ulysses x tp = 6: it must divide the query heads, got 32"
    );
    (shape.heads, shape.kv_heads) = (24, 8);
    assert_eq!(
        refusal(with(Axis::Ulysses, 12), &shape),
        "plan axis ulysses x tp = 12: it must divide, or be a multiple of, the KV heads, got 8"
    );
    shape.kv_heads = 7;
    assert!(refusal(Plan::default(), &shape).contains("KV heads must divide the query heads"));
}

#[test]
fn experts_and_inner_widths_name_their_layer() {
    let mut shape = published();
    shape.layers[5] = LayerShape {
        experts: 6,
        ..shape.layers[5]
    };
    let plan = Plan {
        ulysses: 4,
        ep: Axis::Ulysses.into(),
        ..Plan::default()
    };
    assert_eq!(
        refusal(plan, &shape),
        "plan axis ulysses = 4: it must divide the experts of layer 5, got 6"
    );
    shape.layers[5] = LayerShape {
        experts: 64,
        expert_inner: 3070,
        shared_inner: None,
    };
    let inner = "plan axis tp = 4: it must divide the expert inner width of layer 5, got 3070";
    assert_eq!(refusal(with(Axis::Tp, 4), &shape), inner);
    // Whole experts are spread when tp is an axis of ep, so their width is not split.
    let plan = Plan {
        ep: Axis::Tp.into(),
        ..with(Axis::Tp, 4)
    };
    assert!(plan.validate(&shape).is_ok());
    shape.layers[5].shared_inner = Some(10);
    let shared = "plan axis tp = 4: it must divide the shared inner width of layer 5, got 10";
    assert_eq!(refusal(plan, &shape), shared);
}

#[test]
fn stages_need_layers_and_keep_their_experts() {
    let mut shape = published();
    shape.layers.truncate(3);
    let few = "plan axis pp = 4: it must not exceed the layers, got 3";
    assert_eq!(refusal(with(Axis::Pp, 4), &shape), few);
    let plan = Plan {
        ep: Axis::Pp.into(),
        ..with(Axis::Pp, 2)
    };
    assert!(refusal(plan, &shape).contains("ep must be a product of cfg, ring, ulysses, tp"));
}

#[test]
fn guidance_ranks_need_two_rows() {
    let mut shape = published();
    let three = "plan axis cfg = 3: it must not exceed the guidance rows, got 2";
    assert_eq!(refusal(with(Axis::Cfg, 3), &shape), three);
    shape.cfg_distilled = true;
    assert!(refusal(with(Axis::Cfg, 2), &shape).contains("distilled"));
    for guidance in [1.0, 0.0, f64::NAN] {
        let e = with(Axis::Cfg, 2).check_guidance(guidance).unwrap_err();
        assert!(e.to_string().contains("guidance above 1"), "{e}");
        assert!(Plan::default().check_guidance(guidance).is_ok());
    }
    assert!(with(Axis::Cfg, 2).check_guidance(5.0).is_ok());
}

#[test]
fn ep_ranks_are_found_as_a_product_of_axes() {
    let plan = Plan {
        pp: 5,
        cfg: 2,
        ulysses: 2,
        tp: 4,
        ..Plan::default()
    };
    let ep = |ranks| plan.with_ep_ranks(ranks).map(|p| p.ep);
    assert_eq!(ep(1).unwrap(), AxisSet::EMPTY);
    assert_eq!(ep(2).unwrap(), Axis::Ulysses.into());
    assert_eq!(ep(4).unwrap(), Axis::Tp.into());
    assert_eq!(ep(8).unwrap(), AxisSet::HEADS);
    assert_eq!(ep(16).unwrap(), AxisSet::HEADS.with(Axis::Cfg));
    for ranks in [0, 3, 5, 10, 32] {
        let e = ep(ranks).unwrap_err().to_string();
        assert!(e.contains(&format!("ep = {ranks}")), "{e}");
    }
}

#[test]
fn a_plan_is_written_with_axis_names_and_unknown_fields_are_refused() {
    let plan: Plan = serde_json::from_str(r#"{"tp": 4, "ep": ["cfg", "tp"], "cfg": 2}"#).unwrap();
    assert_eq!((plan.tp, plan.cfg, plan.pp), (4, 2, 1));
    assert_eq!(plan.ep, AxisSet::of(&[Axis::Tp, Axis::Cfg]));
    let again: Plan = serde_json::from_str(&serde_json::to_string(&plan).unwrap()).unwrap();
    assert_eq!(again, plan);
    assert!(serde_json::from_str::<Plan>(r#"{"dp": 2}"#).is_err());
    assert!(serde_json::from_str::<Plan>(r#"{"ep": ["tp", "tp"]}"#).is_err());
}

#[test]
fn legal_plans_are_those_that_validate_and_no_others() {
    let mut shape = published();
    (shape.heads, shape.kv_heads) = (6, 3);
    for l in &mut shape.layers {
        (l.experts, l.shared_inner) = (4, None);
    }
    for ranks in [1, 2, 3, 4, 6, 8] {
        let mut expected = Vec::new();
        let sizes = || 1..=ranks;
        for (pp, cfg, ring) in
            sizes().flat_map(|p| sizes().flat_map(move |c| sizes().map(move |r| (p, c, r))))
        {
            for (ulysses, tp) in sizes().flat_map(|u| sizes().map(move |t| (u, t))) {
                for ep in AxisSet::ALL.subsets() {
                    let plan = Plan {
                        pp,
                        cfg,
                        ring,
                        ulysses,
                        tp,
                        ep,
                        ..Plan::default()
                    };
                    let all = plan.sizes().iter().product::<usize>() == ranks;
                    let used = ep.axes().all(|a| plan.sizes()[a as usize] > 1);
                    if all && used && plan.validate(&shape).is_ok() {
                        expected.push(plan);
                    }
                }
            }
        }
        let legal = Plan::legal(&shape, ranks).unwrap();
        assert_eq!(legal.len(), expected.len(), "{ranks} ranks");
        assert!(expected.iter().all(|plan| legal.contains(plan)));
    }
    assert_eq!(Plan::legal(&shape, 1).unwrap(), [Plan::default()]);
    assert!(Plan::legal(&shape, 0).is_err());
    // tp = 4 breaks six heads; ring = 5 breaks nothing, its experts stay replicated.
    assert!(Plan::legal(&shape, 4).unwrap().iter().all(|p| p.tp < 4));
    assert_eq!(Plan::legal(&shape, 5).unwrap().len(), 2);
}
