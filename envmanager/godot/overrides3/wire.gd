# Without: append_block


func receive() -> bool:
	var began_us = OS.get_ticks_usec()
	var spins = may_spin and _rest == 0
	while spins and _peer.get_available_bytes() < 12:
		spins = OS.get_ticks_usec() - began_us < SPIN_US
	var head = _peer.get_data(12)
	if head[0] != OK:
		return false
	_rest = int(max(_rest - 1, 0)) if OS.get_ticks_usec() - began_us < SPIN_US else REST
	var header = to_ints(head[1])
	kind = header[1] & 0xFF
	ticket = header[2]
	body = PoolByteArray()
	if header[0] > 0:
		var rest = _peer.get_data(header[0])
		if rest[0] != OK:
			return false
		body = rest[1]
	received_us = OS.get_ticks_usec()
	return true


func json():
	var parsed = JSON.parse(body.get_string_from_utf8())
	return parsed.result if parsed.error == OK and parsed.result is Dictionary else null


func send(of_kind: int, bytes: PoolByteArray, of_ticket := ticket) -> void:
	var frame = bytes_of(PoolIntArray([bytes.size(), of_kind, of_ticket]))
	frame.append_array(bytes)
	_peer.put_data(frame)


# The bytes of a packed array of any of the three types. There is no other way to them than that of Variants, which puts
# 8 bytes (type, count) before them.
static func bytes_of(numbers) -> PoolByteArray:
	return numbers if typeof(numbers) == TYPE_RAW_ARRAY or numbers.size() == 0 else var2bytes(numbers).subarray(8, -1)


static func to_ints(bytes: PoolByteArray) -> PoolIntArray:
	return _to_array(TYPE_INT_ARRAY, bytes)


static func to_floats(bytes: PoolByteArray) -> PoolRealArray:
	return _to_array(TYPE_REAL_ARRAY, bytes)


# The bytes, padded to 4.
static func padded(bytes: PoolByteArray) -> PoolByteArray:
	while bytes.size() % 4 != 0:
		bytes.append(0)
	return bytes


# A part of an array of bytes, which may be empty.
static func part(bytes: PoolByteArray, from: int, end: int) -> PoolByteArray:
	return bytes.subarray(from, end - 1) if end > from else PoolByteArray()


static func _to_array(type: int, bytes: PoolByteArray):
	var variant = PoolByteArray([type, 0, 0, 0])
	variant.append_array(var2bytes(bytes.size() >> 2).subarray(4, 7))
	variant.append_array(bytes)
	return bytes2var(variant)
