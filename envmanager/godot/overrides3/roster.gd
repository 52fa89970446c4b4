# Without: write, _write_section, _write_bits, _write_observations, _write_floats, _write_parts


# The sections of a steps frame, and its infos: of all agents, or of those of some copies (by index).
func written(only: Dictionary) -> PoolByteArray:
	var sections = 0
	var out = PoolByteArray()
	_infos = {}
	for group in groups:
		var rows = group.rows(only)
		group.acting = []
		if rows.empty() and group.leavers.empty():
			continue
		if rows.size() > group.max_agents:
			fault("%d agents of behavior '%s', max_agents allows %d" % [rows.size(), group.name, group.max_agents], null)
		_is_looking = true
		out.append_array(_section(group, rows))
		_is_looking = false
		group.changed = not (group.leavers.empty() and only.empty())
		group.leavers = []
		sections += 1
	var text = PoolByteArray() if _infos.empty() else JSON.print(Wire.plain(_infos)).to_utf8()
	var all = Wire.bytes_of(PoolIntArray([sections]))
	all.append_array(out)
	all.append_array(Wire.bytes_of(PoolIntArray([text.size()])))
	all.append_array(Wire.padded(text))
	return all


func act(body: PoolByteArray) -> void:
	var ints = Wire.to_ints(body)
	var at = 1  # in units of 4 bytes
	var led = {}  # group -> where its actions begin
	for _section in ints[0]:
		var number = ints[at] & 0xFFFF
		var n = ints[at + 1]
		if number >= groups.size() or n != groups[number].acting.size():
			fault("the step has %d rows for behavior %d; another number of its agents wants actions" % [n, number], null)
			return
		led[groups[number]] = at + 2
		at += 2 + n * (groups[number].continuous_size + groups[number].discrete_choices.size())
	if 4 * at != body.size():
		fault("the step has %d bytes, its sections have %d" % [body.size(), 4 * at], null)
		return
	var others = []
	for group in groups:
		if not led.has(group):
			others.append(group)
	var decided = _decided(others)
	for group in led:
		_act_group(group, body, led[group])
	_play_alone(others, decided)


func _section(group, rows: Array) -> PoolByteArray:
	var rewards = PoolRealArray()
	var bits = PoolByteArray()
	var finals = []
	var acting = group.acting
	for agent in rows:
		var bit = agent._bits
		if bit != 0:
			finals.append(agent._final)
			agent._bits = 0
			agent._final = null
		if agent.wants_action and not agent._copy.rests:
			bit |= ACTING
			acting.append(agent)
		bits.append(bit)
		rewards.append(agent.reward)
		agent.reward = 0.0
	for leaver in group.leavers:
		bits.append(leaver.bits)
		rewards.append(leaver.reward)
		finals.append(leaver.final)
	var flags = 0 if group.changed else SAME
	flags |= SOME_ENDED if not finals.empty() else 0
	flags |= ALL_ACT if acting.size() == bits.size() else 0
	var out = Wire.bytes_of(PoolIntArray([group.number | flags << 16, bits.size()]))
	if group.changed:
		out.append_array(group.ids(rows))
	out.append_array(_observed(group, rows))
	out.append_array(Wire.bytes_of(rewards))
	out.append_array(Wire.padded(bits))
	if not finals.empty():
		out.append_array(_joined(group, finals))
	if with_infos:
		_add_infos(group, rows, bits)
	return out


func _observed(group, rows: Array) -> PoolByteArray:
	if group.is_one_float_array:
		return _observed_floats(group, rows)
	var all = []
	for agent in rows:
		all.append(_seen_by(agent))
	for leaver in group.leavers:
		all.append(leaver.final)
	return _joined(group, all)


# The same for the commonest case, faster.
func _observed_floats(group, rows: Array) -> PoolByteArray:
	var size = group.sizes[0]
	var numbers = PoolRealArray()
	for agent in rows:
		var seen = agent.observe()
		if typeof(seen) != TYPE_REAL_ARRAY or seen.size() != size:
			fault("observe() returned " + group.what_is_wrong_with([seen]), agent, "observe")
			return PoolByteArray()
		numbers.append_array(seen)
	for leaver in group.leavers:
		if leaver.final != null:
			numbers.append_array(leaver.final[0])
	return Wire.bytes_of(numbers)


func _joined(group, all: Array) -> PoolByteArray:
	var out = PoolByteArray()
	if all.has(null):
		return out  # there is a fault already, and no steps will be sent
	for i in group.sizes.size():
		var block = PoolByteArray()
		for parts in all:
			block.append_array(Wire.bytes_of(parts[i]))
		out.append_array(Wire.padded(block))
	return out


func _act_group(group, body: PoolByteArray, from: int) -> void:
	var n = group.acting.size()
	var width = group.continuous_size
	var choices = group.discrete_choices.size()
	var middle = from + n * width
	var end = middle + n * choices
	var continuous = Wire.to_floats(Wire.part(body, 4 * from, 4 * middle))
	var discrete = Wire.to_ints(Wire.part(body, 4 * middle, 4 * end))
	for i in n:
		var agent = group.acting[i]
		if not is_instance_valid(agent) or agent._k < 0:  # an act() before may have made it leave
			continue
		var numbers = PoolRealArray()
		for j in range(i * width, (i + 1) * width):
			numbers.append(continuous[j])
		var chosen = PoolIntArray()
		for j in range(i * choices, (i + 1) * choices):
			chosen.append(discrete[j])
		agent.act(numbers, chosen)
