use crate::format::catalog::packed_path;
use crate::plan::SavePlan;
use crate::spec::TensorSpec;
use crate::{Chunk, Codec, Error, Result, TensorEntry};
use storage::FileEntry;

/// The output of all writers of a plan: for each the files, in plan order, and the chunks of each
/// file.
pub(crate) type WriterFiles = Vec<Vec<(FileEntry, Vec<Chunk>)>>;

/// Merges the output of all writers into manifest entries. The parts may come from other processes,
/// so they are compared with the plan.
pub(crate) fn merge_parts(
    plan: &SavePlan,
    codec: Option<Codec>,
    parts: WriterFiles,
) -> Result<(Vec<FileEntry>, Vec<TensorEntry>)> {
    let bad = |writer: usize, found: String, expected: String| {
        let reason = format!("expected {expected} as planned, found {found}");
        Err(Error::BadInput { object: format!("the part of writer {writer}"), reason })
    };
    if parts.len() != plan.writers() {
        let found = format!("{} parts", parts.len());
        return bad(parts.len(), found, format!("one of each of {} writers", plan.writers()));
    }
    let mut files = Vec::new();
    let mut chunks: Vec<Vec<Option<Chunk>>> =
        (0..plan.specs().len()).map(|tensor| vec![None; plan.pieces(tensor)]).collect();
    for (writer, part) in parts.into_iter().enumerate() {
        let shards = plan.shards(writer);
        if part.len() != shards.len() {
            let (found, expected) = (part.len(), shards.len());
            return bad(writer, format!("{found} files"), format!("{expected} files"));
        }
        for (shard, (file, in_file)) in shards.iter().zip(part) {
            let path = codec.map_or_else(|| shard.file.clone(), |_| packed_path(&shard.file));
            if file.path != path || codec.is_none() && file.bytes != shard.bytes() {
                let found = format!("{} of {} bytes", file.path, file.bytes);
                return bad(writer, found, format!("{path} of {} bytes", shard.bytes()));
            }
            if in_file.len() != shard.pieces.len() {
                let found = format!("{} chunks in {}", in_file.len(), file.path);
                return bad(writer, found, format!("{} chunks", shard.pieces.len()));
            }
            for (piece, chunk) in shard.pieces.iter().zip(in_file) {
                // The offset of a packed chunk depends on the packed lengths of those before it.
                let offset = if codec.is_some() { chunk.offset } else { piece.offset };
                let location = (&path, offset, piece.bytes.len() as u64);
                if (&chunk.file, chunk.offset, chunk.bytes) != location
                    || chunk.region() != piece.region
                    || chunk.packed.as_ref().map(|packed| packed.codec) != codec
                {
                    return bad(writer, format!("{chunk:?}"), format!("{piece:?}"));
                }
                chunks[piece.tensor][piece.k] = Some(chunk);
            }
            files.push(file);
        }
    }
    let entry = |(spec, chunks): (&TensorSpec, Vec<Option<Chunk>>)| TensorEntry {
        name: spec.name.clone(),
        group: spec.group,
        dtype: spec.dtype,
        shape: spec.shape.clone(),
        chunks: chunks.into_iter().flatten().collect(),
    };
    Ok((files, plan.specs().iter().zip(chunks).map(entry).collect()))
}
