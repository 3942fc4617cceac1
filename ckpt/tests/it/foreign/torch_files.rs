//! Writes small files in the format of `torch.save` before 1.6: five pickles, then the storages.

use std::path::Path;

/// The opcodes that build an object.
pub struct TorchObject(Vec<u8>);

/// A storage, which follows the pickles.
pub struct Storage {
    pub key: String,
    pub elements: u64,
    pub bytes: Vec<u8>,
}

pub fn text(text: &str) -> TorchObject {
    let mut code = vec![b'X'];
    code.extend(u32::try_from(text.len()).unwrap().to_le_bytes());
    code.extend(text.as_bytes());
    TorchObject(code)
}

pub fn dict<'a>(pairs: impl IntoIterator<Item = (&'a str, TorchObject)>) -> TorchObject {
    let mut code = b"}(".to_vec();
    for (key, value) in pairs {
        code.extend(text(key).0);
        code.extend(value.0);
    }
    code.push(b'u');
    TorchObject(code)
}

/// A contiguous tensor of a whole storage.
pub fn tensor(class: &str, key: &str, shape: &[u64]) -> TorchObject {
    let int = |value: u64| {
        let mut code = vec![b'J'];
        code.extend(i32::try_from(value).unwrap().to_le_bytes());
        code
    };
    let tuple = |values: &[u64]| {
        let mut code = vec![b'('];
        values.iter().for_each(|&value| code.extend(int(value)));
        code.push(b't');
        code
    };
    let strides: Vec<u64> = (1..=shape.len()).map(|at| shape[at..].iter().product()).collect();
    let mut code = b"ctorch._utils\n_rebuild_tensor_v2\n((".to_vec();
    code.extend(text("storage").0);
    code.extend(format!("ctorch\n{class}\n").as_bytes());
    code.extend(text(key).0);
    code.extend(text("cpu").0);
    code.extend(int(shape.iter().product()));
    code.extend(b"NtQ");
    code.extend(int(0));
    code.extend(tuple(shape));
    code.extend(tuple(&strides));
    code.extend(b"\x89}tR");
    TorchObject(code)
}

/// The same with a flag instead of a change of its elements, as torch stores a conjugate.
pub fn flagged(tensor: TorchObject, flag: &str) -> TorchObject {
    let mut code = tensor.0;
    code.truncate(code.len() - b"tR".len());
    code.push(b'}');
    code.extend(text(flag).0);
    code.extend(b"\x88stR");
    TorchObject(code)
}

pub fn write_torch(path: &Path, object: &TorchObject, storages: &[Storage]) {
    // The magic number, the version, and the description of the machine.
    let mut bytes = b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19.".to_vec();
    bytes.extend(b"\x80\x02M\xe9\x03.\x80\x02}.\x80\x02");
    bytes.extend(&object.0);
    bytes.extend(b".\x80\x02](");
    storages.iter().for_each(|storage| bytes.extend(text(&storage.key).0));
    bytes.extend(b"e.");
    for storage in storages {
        bytes.extend(storage.elements.to_le_bytes());
        bytes.extend(&storage.bytes);
    }
    std::fs::write(path, bytes).unwrap();
}
