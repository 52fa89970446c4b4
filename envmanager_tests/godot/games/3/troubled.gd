extends "res://addons/envmanager/arena.gd"
# Does wrong what the option "fail" names, in arena "in" or in all.

var fail: String = ""
var actions: int = 0


func reset(_from: RandomNumberGenerator, options: Dictionary) -> void:
	fail = options.get("fail", "") if options.get("in", index) == index else ""
	actions = 0
	if fail == "reset":
		_call_nobody()


func observe():  # observe() is here
	if actions == 0:
		return PoolRealArray([0, 0])
	match fail:
		"observe":
			var nobody = null
			nobody.call_me()  # in observe
		"size":
			return PoolRealArray([1, 2, 3])
		"nan":
			return PoolRealArray([NAN, index])
		"type":
			return "what I see"
		"array":
			return [1.0, 2.0]
	return PoolRealArray([actions, index])


func act(_continuous: PoolRealArray, _discrete: PoolIntArray) -> void:
	actions += 1
	if fail == "nan reward":
		add_reward(INF)
	elif fail == "act":
		_call_nobody()
	elif fail == "slow":
		OS.delay_msec(50)
	elif fail == "loop":
		while true:
			pass
	elif fail == "quit":
		get_tree().quit(3)
	elif fail == "close":
		get_tree().quit()
	elif fail == "stranger":
		var stranger = load("res://rat.tscn").instance()
		add_child(stranger)


func heuristic() -> void:
	act(PoolRealArray(), PoolIntArray([0]))


func after_tick() -> void:
	if fail == "after_tick":
		_call_nobody()


func _call_nobody() -> void:
	var nobody = null
	nobody.call_me()  # in _call_nobody
