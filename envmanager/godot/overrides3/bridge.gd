func _send_steps(only: Dictionary) -> void:
	pictures.is_old = true
	if not only.empty():
		_roster.note_change()
	var sections = _roster.written(only)
	if not _send_faults():
		var frame = Wire.bytes_of(PoolIntArray([OS.get_ticks_usec() - _wire.received_us]))
		frame.append_array(sections)
		_wire.send(Wire.STEPS, frame)
