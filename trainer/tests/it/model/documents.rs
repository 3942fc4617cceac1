//! Documents that share a row: the results for each are those for it alone.

use crate::families::{LLAMA, VOCAB, check_close, config, values, weight};
use indexed::Dtype;
use loader::batch::{
    Batch, EncDecAssemble, EncDecBatch, EncDecConfig, EncDecPart, GptAssemble, GptConfig,
};
use loader::{Assemble, PieceRef, Sample, SampleOrigin};
use tch::{Kind, Tensor};
use trainer::config::ModelConfig;
use trainer::model::{LossWeights, Micro, Model, Stage, Tp};

const EOD: i64 = 1;

/// A whole model with the weights of the references.
fn whole(config: &ModelConfig) -> (Stage, Vec<Tensor>) {
    let model = Model::new(config, 1);
    let param = |at: usize| {
        let spec = &model.params()[at];
        let param = Tensor::zeros(spec.local_shape(1), (Kind::Float, tch::Device::Cpu));
        param.narrow(0, 0, spec.shape[0]).copy_(&weight(&spec.name, &spec.shape));
        param
    };
    let params: Vec<Tensor> = (0..model.params().len()).map(param).collect();
    let stage = model.stage(0..model.units(), &Tp::alone(), |_| false);
    let leaves = stage.leaves(&params, Kind::Float).unwrap();
    (stage, leaves)
}

fn logits(stage: &Stage, leaves: &[Tensor], micro: &Micro) -> Tensor {
    let outs = stage.infer(leaves, micro, Vec::new()).unwrap();
    stage.logits(leaves, &outs[0]).unwrap()
}

/// The batch that the loader makes of a sample in pieces.
fn batch_of<A: Assemble>(mut assemble: A, pieces: &[&[i32]]) -> A::Batch
where
    A::Batch: Default,
{
    let bytes: Vec<u8> =
        pieces.iter().flat_map(|p| p.iter().flat_map(|t| t.to_le_bytes())).collect();
    let piece =
        |piece: &&[i32]| PieceRef { file: 0, offset_bytes: 0, len_bytes: 4 * piece.len() as u64 };
    let pieces: Vec<PieceRef> = pieces.iter().map(piece).collect();
    let sample =
        Sample { number: 0, origin: SampleOrigin::default(), pieces: &pieces, bytes: &bytes };
    let mut batch = A::Batch::default();
    assemble.begin(&mut batch, 0, 1);
    assemble.set_row(&mut batch, 0, &sample).unwrap();
    batch
}

#[test]
fn a_decoder_attends_to_its_own_document() {
    let weights = LossWeights { token: 1.0, sample: 1.0 };
    // The last token is a label only.
    let text: Vec<i32> = vec![5, 9, 30, 1, 17, 1, 8, 44, 21, 3, 12, 40, 2];
    let documents = [0..4, 4..6, 6..12];
    for family in ["", "positions = 'none'", LLAMA] {
        let (stage, leaves) = whole(&config(family));
        let reset = GptConfig {
            eod: Some(EOD),
            reset_position_ids: true,
            reset_attention_mask: true,
            ..GptConfig::new(text.len() - 1)
        };
        let row: Batch = batch_of(GptAssemble::new(reset, vec![Dtype::I32]).unwrap(), &[&text]);
        let together = logits(&stage, &leaves, &Micro::gpt(&row, weights).unwrap());
        for document in &documents {
            let alone: Vec<i32> = text[document.start..=document.end].to_vec();
            let plain = GptConfig::new(document.len());
            let alone: Batch =
                batch_of(GptAssemble::new(plain, vec![Dtype::I32]).unwrap(), &[&alone]);
            let expected = logits(&stage, &leaves, &Micro::gpt(&alone, weights).unwrap());
            let found = together.narrow(0, document.start as i64, document.len() as i64);
            check_close(
                &format!("{family} {document:?}"),
                &values(&found),
                &values(&expected),
                1e-5,
            );
        }
        // Without a reset it attends to more; otherwise the above would prove nothing.
        let plain = GptConfig::new(text.len() - 1);
        let plain: Batch = batch_of(GptAssemble::new(plain, vec![Dtype::I32]).unwrap(), &[&text]);
        let mixed = logits(&stage, &leaves, &Micro::gpt(&plain, weights).unwrap());
        let apart = (mixed - together).narrow(0, 4, 8).abs().max().double_value(&[]);
        assert!(apart > 1e-2, "{family}: {apart}");
    }
}

/// The second document of the decoder attends to the second of the encoder, and not to the first.
#[test]
fn an_answer_attends_to_its_own_document() {
    let config = config("family = 't5'\ndec_len = 8");
    let (stage, leaves) = whole(&config);
    let outs = |context: &[i32]| {
        let assemble = EncDecConfig {
            encoder_len: 6,
            decoder_len: 8,
            vocab_size: 40,
            bos: 2,
            eod: EOD,
            pad: 0,
            sentinels: vec![VOCAB - 3, VOCAB - 2, VOCAB - 1],
            reset_position_ids: false,
            reset_attention_mask: true,
        };
        let part =
            EncDecPart { context: Dtype::I32, target: Dtype::I32, target_offset: Dtype::I32 };
        let assemble = EncDecAssemble::new(assemble, vec![part]).unwrap();
        // A document ends within the first span.
        let pieces: [&[i32]; 3] = [context, &[40, 6, 1, 8, 41, 9], &[0, 4, 4, 2]];
        let batch: EncDecBatch = batch_of(assemble, &pieces);
        assert_eq!(batch.loss_mask, [1.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0, 0.0]);
        let micro = Micro::encdec(&batch, LossWeights { token: 1.0, sample: 1.0 }).unwrap();
        let logits = logits(&stage, &leaves, &micro);
        (values(&logits.narrow(0, 0, 3)), values(&logits.narrow(0, 3, 3)))
    };
    let (first, second) = outs(&[2, 3, 40, 4, 41, 5]);
    let (other, same) = outs(&[2, 13, 40, 4, 41, 5]);
    assert!(other != first && same == second, "the first document is of the first answer");
    let (same, other) = outs(&[2, 3, 40, 4, 41, 15]);
    assert!(other != second && same == first, "the second document is of the second answer");
}
