use proptest::prelude::*;

use super::*;

fn modules() -> Vec<ModuleDecl> {
    let block = |path: &str| ModuleDecl {
        path: path.to_owned(),
        inputs: vec![("hidden".to_owned(), 2), ("rope".to_owned(), 3)],
        outputs: vec![2, 2],
    };
    let mut all: Vec<_> = ["", "blocks.0", "blocks.1", "blocks.1.attn", "norm"]
        .map(block)
        .into();
    all[0].outputs = vec![3];
    all
}

/// A row that fits; tests change one thing.
fn row() -> SpRow {
    SpRow {
        module: "blocks.*".to_owned(),
        input: Some("hidden".to_owned()),
        split_dim: Some(0),
        expected_dims: 2,
        ..SpRow::default()
    }
}

fn bind(rows: Vec<SpRow>) -> Result<BoundSpPlan, String> {
    SpPlan { rows }.bind(&modules()).map_err(|e| e.to_string())
}

#[test]
fn a_table_is_read_and_bound() {
    let table = r#"[
        {"module": "", "input": "hidden", "split_dim": 0, "expected_dims": 2, "auto_pad": true},
        {"module": "blocks.*", "input": "rope", "split_dim": 1, "expected_dims": 3},
        {"module": "blocks.0", "output": 1, "split_dim": 1, "expected_dims": 2, "text_first": true},
        {"module": "", "output": 0, "gather_dim": 1, "expected_dims": 3}
    ]"#;
    let plan: SpPlan = serde_json::from_str(table).unwrap();
    let bound = plan.bind(&modules()).unwrap();
    let of = |module: &str, name: &str| bound.input(module, name).map(|r| r.action);
    assert_eq!(of("", "hidden"), Some(SpAction::Split { dim: 0 }));
    assert_eq!(of("blocks.0", "rope"), Some(SpAction::Split { dim: 1 }));
    assert_eq!(of("blocks.1", "rope"), Some(SpAction::Split { dim: 1 }));
    // A star is one name, not a path.
    assert_eq!(of("blocks.1.attn", "rope"), None);
    assert_eq!(of("", "rope"), None);
    assert!(bound.output("blocks.0", 1).unwrap().text_first);
    assert_eq!(
        bound.output("", 0).unwrap().action,
        SpAction::Gather { dim: 1 }
    );
    assert_eq!(bound.rules().len(), 5);
    let again: SpPlan = serde_json::from_str(&serde_json::to_string(&plan).unwrap()).unwrap();
    assert_eq!(again, plan);
    assert!(serde_json::from_str::<SpPlan>(r#"[{"module": "", "axis": 0}]"#).is_err());
    // A lone star is every module with one name, so not the model itself.
    let star = SpRow {
        module: "*".into(),
        ..row()
    };
    assert_eq!(bind(vec![star]).unwrap().rules()[0].module, "norm");
}

#[test]
fn a_row_that_does_not_fit_is_an_error_at_load() {
    let refusal = |change: fn(&mut SpRow)| {
        let mut row = row();
        change(&mut row);
        bind(vec![row]).unwrap_err()
    };
    for (change, words) in [
        (
            (|r| r.module = "layers.*".into()) as fn(&mut SpRow),
            "no module has this path",
        ),
        (|r| r.module = "blocks..0".into(), "empty name"),
        (
            |r| r.input = Some("hiden".into()),
            "has only the inputs hidden, rope",
        ),
        (
            |r| r.input = Some("rope".into()),
            "2 dimensions expected, module \"blocks.0\" declares 3",
        ),
        (|r| r.input = None, "either input or output"),
        (|r| r.output = Some(0), "either input or output"),
        (|r| (r.input, r.output) = (None, Some(2)), "has 2 outputs"),
        (|r| r.split_dim = None, "either split_dim or gather_dim"),
        (|r| r.gather_dim = Some(0), "either split_dim or gather_dim"),
        (|r| r.split_dim = Some(2), "dimension 2 is not one of 2"),
        (|r| r.expected_dims = 3, "3 dimensions expected"),
    ] {
        let error = refusal(change);
        assert!(error.contains(words), "{error}");
    }
    let error = bind(vec![
        row(),
        SpRow {
            module: "blocks.1".into(),
            ..row()
        },
    ])
    .unwrap_err();
    assert_eq!(
        error,
        "sequence plan entry \"blocks.1\" input hidden: another row has input hidden of \"blocks.1\""
    );
}

#[test]
fn a_tensor_that_does_not_fit_its_rule_is_refused() {
    let bound = bind(vec![row()]).unwrap();
    let rule = bound.input("blocks.0", "hidden").unwrap();
    let refusal = |shape: &[usize], text| rule.split(shape, text, 4).unwrap_err().to_string();
    assert!(refusal(&[8, 2, 2], 0).contains("2 dimensions declared, got 3"));
    assert!(refusal(&[9, 2], 0).contains("9 tokens do not divide over 4 ranks"));
    assert!(refusal(&[8, 2], 1).contains("text_first is not set"));
    let split = rule.split(&[8, 2], 0, 4).unwrap();
    assert!(split.shard(&[0.0_f32; 15], 0).is_err());
    assert!(split.shard(&[0.0_f32; 16], 4).is_err());
    assert!(split.gather(&vec![vec![0.0_f32; 4]; 3]).is_err());
    assert!(split.gather(&vec![vec![0.0_f32; 3]; 4]).is_err());
}

proptest! {
    /// Gather after shard is the identity, whatever is padded, and text is whole everywhere.
    #[test]
    fn gathered_shards_are_the_tensor(
        before in 0_usize..4, text in 0_usize..5, tokens in 0_usize..20, after in 1_usize..4,
        ranks in 1_usize..6,
    ) {
        let shape = [before, text + tokens, after];
        let split = SpSplit::new(&shape, 1, text, ranks).unwrap();
        let whole: Vec<u32> = (1..=shape.iter().product::<usize>() as u32).collect();
        let parts: Vec<_> = (0..ranks).map(|r| split.shard(&whole, r).unwrap()).collect();
        for part in &parts {
            prop_assert_eq!(part.len(), before * split.local_len() * after);
            if before > 0 {
                prop_assert_eq!(&part[..text * after], &whole[..text * after]);
            }
        }
        let padding = parts.iter().flatten().filter(|&&x| x == 0).count();
        prop_assert_eq!(padding, before * after * split.padding());
        prop_assert_eq!(split.gather(&parts).unwrap(), whole);
    }
}
